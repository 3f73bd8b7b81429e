"""`pd-serve check`: what is wrong is found before anything starts (cases B33 and B34)."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from pd_serve.config import AppConfig
from pd_serve.errors import ConfigError
from pd_serve.ops.check import check
from pd_serve.ops.check_args import argument_mistakes
from pd_serve.ops.check_host import port_problem, resource_mistakes, spare_gpus, this_machine
from pd_serve.ops.check_model import longest, model_mistakes
from pd_serve.ops.local_cluster import free_port


def config(**args: object) -> AppConfig:
    return AppConfig.model_validate(args)


def model_in(directory: Path, **values: object) -> str:
    defaults = {"max_position_embeddings": 4096, "num_attention_heads": 12}
    (directory / "config.json").write_text(json.dumps({**defaults, **values}))
    return str(directory)


def write(tmp_path: Path, args: str, port: int = 8000) -> Path:
    file = tmp_path / "x.yaml"
    file.write_text(
        f"http_options: {{host: 127.0.0.1, port: {port}}}\n"
        "applications:\n"
        "  - name: pd\n"
        "    import_path: pd_serve.app:build\n"
        "    args:\n"
        f"      {args}\n"
    )
    return file


class TestWhole:
    def test_a_right_config_says_what_would_run_where_and_what_was_not_checked(self, tmp_path: Path) -> None:
        checked = check(write(tmp_path, "{engine: fake, decode: {replicas: 2, num_cpus: 1}}"))
        summary = "\n".join(checked.summary())
        assert "decode-v1: 2 x (1 CPU)" in summary
        assert "ingress: 1 x (1 CPU), http://127.0.0.1:8000" in summary
        assert "not checked: resources and port" in summary

    def test_mistakes_of_every_kind_come_together(self, tmp_path: Path) -> None:
        model = model_in(tmp_path)
        args = (
            f"{{model: {{path: {model}, max_model_len: 5000, block_size: 32, engine_args: {{max_num_seq: 1}}}}, "
            "prefill: {num_cpus: 64}, decode: {tensor_parallel_size: 5}}"
        )
        with pytest.raises(ConfigError) as caught:
            check(write(tmp_path, args), nodes=[{"CPU": 2.0}])
        text = caught.value.message
        assert "x.yaml:6: model.max_model_len: is 5000, but the model goes to 4096" in text
        assert "x.yaml:6: model.engine_args.max_num_seq: " in text
        assert "x.yaml:6: prefill.num_cpus: each replica needs 64 CPUs; the largest node has 2" in text
        assert "x.yaml:6: decode.tensor_parallel_size: is 5, which does not divide" in text
        assert len(text.splitlines()) == 4

    def test_serves_own_part_is_looked_at_too(self, tmp_path: Path) -> None:
        file = write(tmp_path, "{engine: fake}")
        file.write_text(file.read_text() + "    deployments: [{name: decode-v1, ray_actor_options: {num_cpu: 1}}]\n")
        with pytest.raises(
            ConfigError, match=r"x\.yaml:7: applications\[0\].*num_cpu: unknown key; did you mean num_cpus"
        ):
            check(file)

    def test_a_port_in_use_is_named_with_its_user(self, tmp_path: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=rf"http_options\.port: port {port} is in use by process \d+"):
                check(write(tmp_path, "{engine: fake}", port), here=True)
        assert port_problem("127.0.0.1", port) == ""

    def test_host_and_port_of_the_command_line_win(self, tmp_path: Path) -> None:
        checked = check(write(tmp_path, "{engine: fake}"), host="127.0.0.2", port=9999, serve_schema=False)
        assert (checked.host, checked.port) == ("127.0.0.2", 9999)
        assert checked.serve["http_options"] == {"host": "127.0.0.2", "port": 9999}
        with pytest.raises(ConfigError, match="--port must be from 1 to 65535, got 70000"):
            check(write(tmp_path, "{engine: fake}"), port=70000, serve_schema=False)

    def test_keys_that_cannot_be_read_or_are_needed_and_missing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("PD_SERVE_API_KEYS", raising=False)
        with pytest.raises(ConfigError, match=r"x\.yaml:6: access\.keys_file: .*none cannot be read: No such file"):
            check(
                write(tmp_path, f"{{engine: fake, access: {{keys_file: {tmp_path}/none}}}}"),
                here=True,
                port=free_port(),
            )
        open_to_all = write(tmp_path, "{engine: fake}")
        with pytest.raises(ConfigError, match=r"http_options\.host: 0\.0\.0\.0 can be reached from other machines"):
            check(open_to_all, here=True, host="0.0.0.0", port=free_port())
        monkeypatch.setenv("PD_SERVE_API_KEYS", "team:long-enough-key")
        assert check(open_to_all, here=True, host="0.0.0.0", port=free_port()).host == "0.0.0.0"

    def test_an_address_that_this_machine_does_not_have(self) -> None:
        assert port_problem("203.0.113.1", 8000).startswith("cannot listen on 203.0.113.1:8000")


class TestModel:
    def found(self, app: AppConfig) -> list[str]:
        return [f"{'.'.join(map(str, path))}: {text}" for path, text in model_mistakes(app, [])]

    def test_a_missing_directory(self, tmp_path: Path) -> None:
        app = config(model={"path": str(tmp_path / "none")})
        assert self.found(app) == [f"model.path: '{tmp_path}/none' is not at {tmp_path}/none: no such directory"]

    def test_a_directory_without_a_config(self, tmp_path: Path) -> None:
        assert self.found(config(model={"path": str(tmp_path)})) == [f"model.path: {tmp_path} holds no config.json"]

    def test_the_demo_model_that_was_not_fetched(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PD_SERVE_CACHE", str(tmp_path))
        assert self.found(config())[0].endswith("run `pd-serve model fetch`")

    def test_a_broken_config(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{")
        assert "config.json cannot be read" in self.found(config(model={"path": str(tmp_path)}))[0]

    def test_a_hub_name_is_allowed_and_said_to_be_unchecked(self) -> None:
        skipped: list[str] = []
        assert list(model_mistakes(config(model={"path": "owner/some-model"}), skipped)) == []
        assert "owner/some-model is a hub name" in skipped[0]

    def test_blocks_that_vllm_does_not_have_on_cpu(self, tmp_path: Path) -> None:
        app = config(model={"path": model_in(tmp_path), "block_size": 16})
        assert self.found(app) == ["model.block_size: is 16; vLLM's attention on CPU needs a multiple of 32"]

    @pytest.mark.parametrize(
        ("values", "limit"),
        [
            ({"max_position_embeddings": 4096}, 4096),
            ({"n_positions": 1024}, 1024),
            ({"text_config": {"max_position_embeddings": 512}}, 512),
            ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 8192),
            ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 4096),
            (
                {
                    "max_position_embeddings": 4096,
                    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000},
                },
                4000,
            ),
            ({"hidden_size": 3}, None),
        ],
    )
    def test_the_models_own_limit(self, values: dict[str, object], limit: int | None) -> None:
        assert longest(values) == limit


class TestArguments:
    def found(self, **args: object) -> list[str]:
        return [f"{'.'.join(map(str, path))}: {text}" for path, text in argument_mistakes(config(**args), [])]

    @pytest.mark.parametrize(
        ("args", "expected"),
        [
            ({"model": {"engine_args": {"enable_expert_paralel": True}}}, "did you mean enable_expert_parallel?"),
            ({"model": {"engine_args": {"enable-expert-parallel": True}}}, "did you mean enable_expert_parallel?"),
            ({"model": {"engine_args": {"zzzz": 1}}}, "model.engine_args.zzzz: vLLM's engine has no such argument"),
            (
                {"decode": {"engine_args": {"max_num_seqs": 1}}},
                "decode.engine_args.max_num_seqs: is set as decode.max_num_seqs",
            ),
            ({"model": {"engine_args": {"max_num_seqs": 1}}}, "is set as prefill.max_num_seqs and decode.max_num_seqs"),
            ({"model": {"engine_args": {"model": "x"}}}, "is set as model.path"),
            ({"model": {"engine_args": {"seed": "one"}}}, "model.engine_args.seed: must be int, got 'one'"),
            ({"model": {"engine_args": {"kv_transfer_config": {}}}}, "must not be set: pd_serve sets it"),
            (
                {"model": {"engine_args": {"tool_call_parser": "x"}}},
                "it belongs at model.frontend_args.tool_call_parser",
            ),
            ({"model": {"frontend_args": {"port": 1}}}, "Serve owns the HTTP server"),
            ({"model": {"frontend_args": {"seed": 1}}}, "it belongs at model.engine_args.seed"),
            ({"model": {"frontend_args": {"dtype": "x"}}}, "it belongs at model.dtype"),
            ({"model": {"frontend_args": {"tool_call_parse": "x"}}}, "did you mean tool_call_parser?"),
            ({"model": {"frontend_args": {"enable_auto_tool_choice": "x"}}}, "must be bool, got 'x'"),
        ],
    )
    def test_a_mistake(self, args: dict[str, object], expected: str) -> None:
        found = self.found(**args)
        assert len(found) == 1
        assert expected in found[0]

    def test_what_vllm_has_is_accepted(self) -> None:
        assert (
            self.found(
                model={
                    "engine_args": {"seed": 1, "enable_expert_parallel": True, "attention_config": {}},
                    "frontend_args": {"tool_call_parser": "hermes", "enable_auto_tool_choice": True},
                },
                decode={"engine_args": {"speculative_config": {"method": "ngram"}}},
            )
            == []
        )


@pytest.mark.case("B34")
class TestResources:
    def found(self, nodes: list[dict[str, float]], **args: object) -> list[str]:
        return [f"{'.'.join(map(str, path))}: {text}" for path, text in resource_mistakes(config(**args), nodes)]

    def test_a_gpu_that_is_not_there_is_said_for_each_pool_apart(self) -> None:
        assert self.found([{"CPU": 8.0}], prefill={"num_gpus": 1.0}, decode={"num_gpus": 2.0}) == [
            "prefill.num_gpus: each replica needs 1 GPUs; the largest node has 0",
            "decode.num_gpus: each replica needs 2 GPUs; the largest node has 0",
        ]

    def test_one_pool_may_fit_where_the_other_does_not(self) -> None:
        found = self.found([{"CPU": 8.0, "GPU": 1.0}], decode={"num_gpus": 4.0, "tensor_parallel_size": 4})
        assert found == ["decode.num_gpus: each replica needs 4 GPUs; the largest node has 1"]

    def test_each_may_fit_and_all_together_not(self) -> None:
        found = self.found([{"CPU": 2.0}, {"CPU": 2.0}], decode={"replicas": 4})
        assert found == [": needs 6 CPUs in all (ingress 1 x 1, prefill 1 x 1, decode 4 x 1); the cluster has 4"]

    def test_fewer_gpus_than_tensor_parallel_workers(self) -> None:
        found = self.found([{"CPU": 8.0, "GPU": 8.0}], decode={"num_gpus": 2.0, "tensor_parallel_size": 4})
        assert found == ["decode.num_gpus: is 2, less than tensor_parallel_size 4"]

    def test_replicas_may_share_a_gpu(self) -> None:
        half = {"num_gpus": 0.5}
        assert not self.found([{"CPU": 8.0, "GPU": 1.0}], prefill=half, decode=half)

    def test_this_machine_holds_the_demo(self) -> None:
        checked = check("configs/local.yaml", nodes=[{"CPU": 2.0}], serve_schema=False, model=False)
        assert checked.app.ingress.num_cpus < 1
        assert this_machine()[0]["CPU"] >= 1


class TestGpusOfAnotherProcess:
    def test_it_gets_those_that_the_app_does_not_need(self) -> None:
        app = config(prefill={"num_gpus": 1.0}, decode={"num_gpus": 2.0, "tensor_parallel_size": 2})
        assert spare_gpus(app, ["0", "1", "4", "5"]) == (3, {"CUDA_VISIBLE_DEVICES": "5"})

    def test_it_shares_them_where_none_is_left(self) -> None:
        app = config(prefill={"num_gpus": 0.5}, decode={"num_gpus": 0.5})
        assert spare_gpus(app, ["0"]) == (None, {})
        assert spare_gpus(app, ["0", "1"]) == (1, {"CUDA_VISIBLE_DEVICES": "1"})

    def test_an_app_without_gpus_leaves_everything_as_it_is(self) -> None:
        assert spare_gpus(config(), ["0", "1"]) == (None, {})
