"""Case B33: every mistake in a config file is found, with its line, its full key path and what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd_serve.config_file import app_config, load_config, read_config
from pd_serve.errors import ConfigError

pytestmark = pytest.mark.case("B33")

HEAD = """\
http_options: {host: 127.0.0.1, port: 8000}
applications:
  - name: pd
    import_path: pd_serve.app:build
    route_prefix: /
"""
ARGS = HEAD + "    args:\n"


def mistakes(tmp_path: Path, text: str, **env: str) -> list[str]:
    """The lines that a file with this text gives, without the file's name."""
    file = tmp_path / "x.yaml"
    file.write_text(text)
    found = read_config(file, env).mistakes()
    assert all(line.startswith(f"{file}:") for line in found)
    return [line.removeprefix(f"{file}:") for line in found]


def test_a_right_file_has_no_mistakes_and_gives_the_values_it_holds(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(ARGS + "      version: 7\n      decode: {replicas: 3, num_cpus: 1}\n      prefill: ~\n")
    app = load_config(file)
    assert (app.version, app.decode.replicas, app.prefill) == ("7", 3, None)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("decode: {max_num_seq: 4}", "7: decode.max_num_seq: unknown key; did you mean max_num_seqs?"),
        ("decode: {replica: 2}", "7: decode.replica: unknown key; did you mean replicas?"),
        ("Decode: {replicas: 2}", "7: Decode: unknown key; did you mean decode?"),
        ('decode: {replicas: "4"}', "7: decode.replicas: must be a whole number, got '4'; write 4 without quotes"),
        ("decode: {replicas: 1.5}", "7: decode.replicas: must be a whole number, got 1.5"),
        ("decode: {replicas: 0}", "7: decode.replicas: must be more than 0, got 0"),
        ("decode: {replicas: yes}", "7: decode.replicas: must be a whole number, got true"),
        ("decode: {num_cpus: -1}", "7: decode.num_cpus: must be at least 0, got -1"),
        ("decode: {gpu_memory_utilization: 2}", "7: decode.gpu_memory_utilization: must be at most 1, got 2"),
        ("decode: {enforce_eager: 1}", "7: decode.enforce_eager: must be true or false, got 1"),
        ("decode: 3", "7: decode: must be a mapping of keys, got 3"),
        ("model: {engine_args: [a]}", "7: model.engine_args: must be a mapping of keys, got a list"),
        ("model: {path: ''}", "7: model.path: must not be empty"),
        ("model: {dtype: bfloat}", "did you mean 'bfloat16'?"),
        ("model: {served_name: yes}", "YAML reads it as true or false: put it in quotes"),
        (
            "decode: {env: {N: 1}}",
            "7: decode.env.N: must be text, got 1; YAML reads it as a whole number: put it in quotes",
        ),
        ("model: {max_num_seqs: 4}", "it belongs at prefill.max_num_seqs or decode.max_num_seqs"),
        ("decode: {max_ongoing_requests: 4}", "it is Serve's and belongs at applications[0].deployments[]"),
        ("pools: {}", "7: pools: unknown key; allowed: access, decode, engine, "),
        (
            "decode: {replicas: ~}",
            "7: decode.replicas: must be a whole number, got nothing (null); give a value, or leave",
        ),
        ("decode: ~", "7: decode: must be a mapping of keys, got nothing (null)"),
        ("version: 'a b'", "7: version: 'a b' has characters that are not allowed here"),
        (
            "limits: {first_token_timeout_s: 700}",
            "7: limits.first_token_timeout_s: is longer than limits.total_timeout_s",
        ),
    ],
)
def test_one_mistake_in_the_args(tmp_path: Path, args: str, expected: str) -> None:
    found = mistakes(tmp_path, f"{ARGS}      {args}\n")
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "1: the file is empty"),
        ("# only a remark\n", "1: the file is empty"),
        ("- a\n", "1: the file must be a mapping with `applications:`, got a list"),
        ("{}\n", "1: applications: is required"),
        ("applications: []\n", "1: applications: must be a list of exactly one application, got 0"),
        (HEAD + "  - name: two\n    import_path: pd_serve.app:build\n", "of exactly one application, got 2"),
        (
            "applications:\n  - name: pd\n",
            "2: applications[0].import_path: is required: import_path: pd_serve.app:build",
        ),
        (HEAD.replace(":build", ":biuld"), "4: applications[0].import_path: must be pd_serve.app:build"),
        (HEAD.replace("8000", "70000"), "1: http_options.port: must be a whole number from 1 to 65535, got 70000"),
        (HEAD.replace("8000", '"8000"'), "1: http_options.port: must be a whole number from 1 to 65535, got '8000'"),
        (HEAD.replace("port:", "prot:"), "1: http_options.prot: unknown key; did you mean port?"),
        (HEAD.replace("route_prefix: /", "route_prefix: v1"), "must be text that begins with '/', got 'v1'"),
        (HEAD + "    max_num_seqs: 3\n", "it belongs at applications[0].args.prefill.max_num_seqs or"),
        (HEAD + "    args: ~\n", "6: applications[0].args: must be a mapping of keys, got nothing (null)"),
        (
            HEAD + "    deployments: [{name: prefil-v1}]\n",
            "there is no deployment 'prefil-v1'; did you mean prefill-v1?",
        ),
        (HEAD + "    deployments: [{name: ingress, num_replica: 2}]\n", "unknown key; did you mean num_replicas?"),
        (HEAD + "\tname: pd\n", "6: a tab is used to indent; YAML allows spaces only"),
        ("applications: [\n", "not readable as YAML"),
        ("a: 1\n---\nb: 2\n", "2: not readable as YAML: but found another document"),
        ("a: &x {b: *x}\n", "an alias refers to what it stands in"),
        ("a: !!python/object:os.system {}\n", "a: "),
        ("1: 2\n", "the key 1 is read as a whole number, not as text; put it in quotes"),
    ],
)
def test_one_mistake_in_the_file(tmp_path: Path, text: str, expected: str) -> None:
    assert any(expected in line for line in mistakes(tmp_path, text))


def test_a_key_given_twice_is_a_mistake_on_its_second_line(tmp_path: Path) -> None:
    found = mistakes(tmp_path, ARGS + "      decode:\n        replicas: 2\n        replicas: 3\n")
    assert found == ["9: decode.replicas: is given twice; the first is on line 8"]


def test_deployments_are_named_after_the_version(tmp_path: Path) -> None:
    text = HEAD + "    deployments: [{name: decode-v1}, {name: decode-v2}]\n    args: {version: v2}\n"
    assert mistakes(tmp_path, text) == [
        "6: applications[0].deployments[0].name: there is no deployment 'decode-v1'; did you mean decode-v2?"
    ]


def test_merged_keys_count_and_may_be_overridden(tmp_path: Path) -> None:
    text = ARGS + "      prefill: &pool {replicas: 2, num_cpus: 1}\n      decode: {<<: *pool, replicas: 4}\n"
    assert mistakes(tmp_path, text) == []
    app = load_config(tmp_path / "x.yaml")
    assert (app.decode.replicas, app.decode.num_cpus) == (4, 1)


def test_all_mistakes_come_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = (
        ARGS.replace("8000", "0") + "      decode: {replicas: 0, max_num_seq: 1}\n      model: {dtype: x}\n      y: 1\n"
    )
    found = mistakes(tmp_path, text)
    assert [line.split(":")[0] for line in found] == ["1", "7", "7", "8", "9"]
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "x.yaml")
    assert len(caught.value.message.splitlines()) == 5


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: cannot be read: No such file"):
        read_config(tmp_path / "nothing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_config(tmp_path / "binary.yaml")


class TestPlaceholders:
    def test_a_whole_value_is_read_as_yaml_would(self, tmp_path: Path) -> None:
        (tmp_path / "x.yaml").write_text(ARGS + "      model: {path: '${WHERE}/m'}\n      decode: {replicas: '${N}'}\n")
        app = load_config(tmp_path / "x.yaml", {"N": "3", "WHERE": "/srv"})
        assert (app.decode.replicas, app.model.path) == (3, "/srv/m")

    def test_an_unset_variable_is_the_only_mistake_there(self, tmp_path: Path) -> None:
        found = mistakes(tmp_path, ARGS + "      decode: {replicas: '${N}'}\n")
        assert found == ["7: decode.replicas: the environment variable N is not set"]

    def test_two_dollars_keep_it(self, tmp_path: Path) -> None:
        (tmp_path / "x.yaml").write_text(ARGS + "      model: {served_name: 'a$${N}'}\n")
        assert load_config(tmp_path / "x.yaml", {}).model.served_name == "a${N}"

    def test_outside_args_they_are_a_mistake_since_serve_reads_that_part(self, tmp_path: Path) -> None:
        found = mistakes(tmp_path, ARGS.replace("8000", "'${PORT}'") + "      version: v1\n", PORT="1")
        assert found == [
            "1: http_options.port: '${PORT}': placeholders work under args only; this part is read by Serve itself"
        ]

    def test_unquoted_in_braces_the_syntax_error_says_what_to_do(self, tmp_path: Path) -> None:
        found = mistakes(tmp_path, ARGS + "      decode: {replicas: ${N}}\n")
        assert "put ${...} in quotes inside { }" in found[0]


def test_serve_hands_args_to_build_and_gets_the_same_config(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(ARGS + "      decode: {replicas: '${N}'}\n")
    reading = read_config(tmp_path / "x.yaml", {"N": "2"})
    assert app_config(reading.serve["applications"][0]["args"], {"N": "2"}) == reading.app


def test_args_that_serve_hands_over_are_judged_by_key_path() -> None:
    with pytest.raises(ConfigError) as caught:
        app_config({"decode": {"replica": 1}, "version": "v 1"}, {})
    assert caught.value.message.splitlines() == [
        "version: 'v 1' has characters that are not allowed here (letters, digits, '.', '_' and '-' are)",
        "decode.replica: unknown key; did you mean replicas?",
    ]


@pytest.mark.parametrize("file", sorted(Path("configs").glob("*.yaml")), ids=str)
def test_every_shipped_config_loads(file: Path) -> None:
    load_config(file)
