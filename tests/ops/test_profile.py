"""Measuring an engine: the fake one's own times come out again, on virtual time."""

import json
import random

import msgspec
import pytest

from pd_serve.config import AppConfig, Model
from pd_serve.engine.base import EngineDescription
from pd_serve.engine.fake import FakeEngine
from pd_serve.errors import ConfigError
from pd_serve.kv.transport.in_process import InProcessEnd, Registry
from pd_serve.ops.profile import (
    Measured,
    Shapes,
    kv_bytes_per_token,
    make_profile,
    measure,
    measure_engine,
    shapes_for,
    table,
)
from pd_serve.sim.fit import fit_steps
from pd_serve.sim.profile import Profile
from pd_serve.types import KvAddress, Role
from tests.path.cluster import fast
from tests.sim.virtual_time import run

SETTINGS = fast(prefill_tokens_per_s=20_000.0, decode_step_s=0.01, max_model_len=4096, max_num_seqs=16)
SHAPES = Shapes(prompts=(100, 500, 1000, 2000), prefixes=(512,), batches=(1, 4, 16), contexts=(20, 200, 900))


async def _measured(shapes):
    engine = FakeEngine(SETTINGS, InProcessEnd(Registry(), "alone"))
    described = await engine.start()
    said = []
    rows = await measure(engine, described, shapes, random.Random(1), said.append)
    await engine.close()
    return described, rows, said


@pytest.fixture(scope="module")
def measured():
    return run(_measured(SHAPES))


def test_every_shape_is_measured(measured):
    _, rows, said = measured
    prompts = [(row.tokens, row.context) for row in rows if row.tokens]
    assert prompts == [(length, prefix) for prefix in (0, 512) for length in SHAPES.prompts]
    assert [row.batch for row in rows if not row.tokens] == [1, 1, 1, 4, 4, 4, 16, 16, 16]
    assert len(said) == len(rows)


def test_the_engines_own_times_come_out(measured):
    _, rows, _ = measured
    for row in rows:
        expected = row.tokens / 20_000 if row.tokens else 0.01
        assert row.seconds == pytest.approx(expected, rel=1e-6), row
    steps = fit_steps(rows).steps
    assert steps.prefill_token_s == pytest.approx(1 / 20_000)
    assert steps.decode_base_s == pytest.approx(0.01)
    for name in ("prefill_base_s", "prefill_attention_s", "decode_sequence_s", "decode_context_s"):
        assert getattr(steps, name) == pytest.approx(0.0, abs=1e-6)


def test_kv_of_a_batch_is_what_its_sequences_have(measured):
    _, rows, _ = measured
    for row in rows:
        if not row.tokens:
            assert min(abs(row.context / row.batch - context) for context in SHAPES.contexts) < 60


def test_shapes_fit_the_engine():
    described = EngineDescription(
        fingerprint="",
        kv=KvAddress("none", ""),
        block_size=16,
        kv_tokens_total=8192,
        max_num_seqs=20,
        max_model_len=2048,
    )
    shapes = shapes_for(described, 1024)
    assert max(shapes.prompts) == 1024
    assert shapes.batches == (1, 4, 16)
    assert max(shapes.contexts) < 2048
    assert all(prefix % 16 == 0 and prefix + max(shapes.prompts) < 2048 for prefix in shapes.prefixes)


def test_a_profile_says_how_it_was_measured(measured):
    described, rows, _ = measured
    found = Measured(described=described, rows=rows, fit=fit_steps(rows), start_s=3.0, warmup_s=0.5)
    profile = make_profile("mine", "a laptop", "a small model", 1000, found)
    assert msgspec.json.decode(msgspec.json.encode(profile), type=Profile) == profile
    assert (profile.kv_tokens, profile.start_s, profile.kv_bytes_per_token) == (described.kv_tokens_total, 3.0, 1000)
    assert "8 prompt steps" in str(profile.measured)
    assert "9 batches" in str(profile.measured)
    assert table(rows, found.fit)[0] == "100 prompt tokens after 0: measured 5.00 ms, fitted 5.00 ms"


@pytest.mark.parametrize(
    ("shape", "model", "expected"),
    [
        ({"num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 36}, {"dtype": "bfloat16"}, 147_456),
        ({"num_attention_heads": 9, "hidden_size": 576, "num_key_value_heads": 3, "num_hidden_layers": 30}, {}, 23_040),
        ({"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}, {"dtype": "float32"}, 1024),
        ({"num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 1}, {"kv_cache_dtype": "fp8"}, 16),
        ({"text_config": {"num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 1}}, {"dtype": "auto"}, 32),
    ],
)
def test_kv_of_a_token_follows_from_the_models_shape(tmp_path, shape, model, expected):
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert kv_bytes_per_token(AppConfig(model=Model(path=str(tmp_path), **model))) == expected


def test_a_model_of_unknown_shape_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="size of its KV"):
        kv_bytes_per_token(AppConfig(model=Model(path=str(tmp_path))))


def test_the_fake_engine_is_not_measured():
    with pytest.raises(ConfigError, match="nothing to measure"):
        run(measure_engine(AppConfig(engine="fake"), Role.DECODE, random.Random(1), print))
