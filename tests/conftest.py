"""What every test shares. Pure tests import neither Ray nor vLLM, and neither does this file."""

from __future__ import annotations

from hypothesis import settings

# A busy machine is no finding.
settings.register_profile("pd_serve", deadline=None, max_examples=100)
settings.load_profile("pd_serve")
