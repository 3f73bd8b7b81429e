import msgspec
import pytest

from pd_serve.errors import ConfigError
from pd_serve.sim.profile import Profile, attention_pairs, load_profile, shipped_profiles, step_s
from tests.sim.small import PROFILE, STEPS


def test_a_step_is_the_sum_of_its_terms():
    assert step_s(STEPS, 100, attention_pairs(50, 100), 0, 0) == pytest.approx(0.003 + 100 * 2e-5 + 100 * 100 * 1e-9)
    assert step_s(STEPS, 0, 0.0, 4, 1000) == pytest.approx(0.005 + 4 * 5e-5 + 1000 * 4e-8)


def test_prompts_and_tokens_in_one_step_share_one_pass_over_the_weights():
    alone = step_s(STEPS, 100, 0.0, 0, 0) + step_s(STEPS, 0, 0.0, 4, 1000)
    assert step_s(STEPS, 100, 0.0, 4, 1000) == pytest.approx(alone - STEPS.prefill_base_s)


def test_every_shipped_profile_loads_and_says_how_it_was_measured():
    assert "h200-qwen3-8b" in shipped_profiles()
    for name in shipped_profiles():
        profile = load_profile(name)
        assert profile.name == name
        explained = " ".join(profile.measured)
        numbers = [*profile.steps.__struct_fields__, *profile.overheads.__struct_fields__]
        for number in (*numbers, "kv_tokens", "kv_bytes_per_token", "start_s", "warmup_s"):
            assert number in explained, f"{name} does not say where {number} is from"


def test_the_h200_profile_gives_the_measured_figures():
    steps = load_profile("h200-qwen3-8b").steps
    for tokens, milliseconds in ((512, 14), (4096, 93), (16_384, 412)):
        assert 1000 * step_s(steps, tokens, attention_pairs(0, tokens), 0, 0) == pytest.approx(milliseconds, rel=0.01)
    for batch, milliseconds in ((2.87, 5.6), (6.86, 6.7), (11.67, 7.6)):
        assert 1000 * step_s(steps, 0, 0.0, batch, int(batch * 4224)) == pytest.approx(milliseconds, rel=0.025)


def test_a_profile_in_a_file(tmp_path):
    file = tmp_path / "mine.json"
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(PROFILE, name="mine")))
    assert load_profile(str(file)).name == "mine"


def test_wrong_profiles_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"shipped are .*h200-qwen3-8b"):
        load_profile("h900")
    file = tmp_path / "broken.json"
    file.write_text('{"name": "x"}')
    with pytest.raises(ConfigError, match=r"broken\.json: .*missing required field"):
        load_profile(str(file))
    known = msgspec.json.decode(msgspec.json.encode(PROFILE))
    file.write_bytes(msgspec.json.encode(known | {"speed": 3}))
    with pytest.raises(ConfigError, match="speed"):
        load_profile(str(file))
    assert isinstance(msgspec.convert(known, Profile), Profile)
