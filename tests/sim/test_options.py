import pytest

from pd_serve.config import AppConfig
from pd_serve.errors import ConfigError
from pd_serve.sim.options import SimOptions, make_spec, read_options
from pd_serve.sim.spec import Fault
from pd_serve.types import Role

TEXT = """
profile: h200-qwen3-8b
seed: 3
replicas: {prefill: 6}
slo: {ttft_s: 0.5}
layout: {gpus_per_node: 4}
faults:
  - {at: 5.0, kind: kill, role: decode, pick: 1}
"""


def config(**other):
    return AppConfig.model_validate({"model": {"max_model_len": 8192}} | other)


def test_options_are_read_and_overridden_by_name():
    options = read_options(TEXT, {"seed": 4, "slo.tpot_s": 0.02})
    assert (options.seed, options.replicas.prefill, options.slo.ttft_s, options.slo.tpot_s) == (4, 6, 0.5, 0.02)
    assert options.faults == (Fault(at=5.0, kind="kill", role=Role.DECODE, pick=1),)
    assert read_options("", {}) == SimOptions()


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("sed: 3", {}, "unknown field `sed`"),
        ("seed: three", {}, r"Expected `int`, got `str` - at `\$.seed`"),
        ("- 1", {}, "must be a mapping"),
        ("seed: [", {}, "options: "),
        ("", {"slo.ttft": 1}, r"unknown field `ttft` - at `\$.slo`"),
        ("seed: 3", {"seed.x": 1}, "seed has no parts"),
        ("faults: [{at: 1, kind: explode, role: decode, pick: 0}]", {}, "explode"),
    ],
)
def test_wrong_options_are_named(text, overrides, message):
    with pytest.raises(ConfigError, match=message):
        read_options(text, overrides)


def test_the_spec_follows_the_config():
    app = config(
        prefill={"replicas": 3, "num_gpus": 2.0, "max_num_batched_tokens": 4096},
        decode={"replicas": 5, "max_num_seqs": 99, "enable_prefix_caching": False},
        ingress={"replicas": 2},
        limits={"max_running": 7, "max_queue": 8},
        kv={"lease_s": 9.0, "load_failure_policy": "fail"},
        routing={"min_handoff_tokens": 100},
    )
    spec = make_spec(app, SimOptions())
    assert spec.prefill is not None
    assert (spec.prefill.replicas, spec.prefill.rules.gpus, spec.prefill.rules.max_num_batched_tokens) == (3, 2.0, 4096)
    assert (spec.decode.replicas, spec.decode.rules.max_num_seqs, spec.ingresses) == (5, 99, 2)
    assert not spec.decode.rules.enable_prefix_caching
    assert (spec.path.admission.max_running, spec.path.admission.max_queue) == (7, 8)
    assert (spec.path.lease_s, spec.path.recompute, spec.path.routing.min_handoff_tokens) == (9.0, False, 100)
    assert spec.path.max_model_len == 8192


def test_options_win_over_the_config():
    spec = make_spec(config(), read_options(TEXT, {"ingresses": 4, "replicas.decode": 2}))
    assert spec.prefill is not None
    assert (spec.prefill.replicas, spec.decode.replicas, spec.ingresses, spec.seed) == (6, 2, 4, 3)


def test_without_a_prefill_pool():
    assert make_spec(config(prefill=None), SimOptions()).prefill is None


def test_a_context_that_the_profile_cannot_hold_is_refused():
    with pytest.raises(ConfigError, match="profile h200-qwen3-8b has KV for"):
        make_spec(config(model={"max_model_len": 10_000_000}), SimOptions())
