"""What every test shares."""

from __future__ import annotations

from hypothesis import settings

# A failing example prints the line that reproduces it. No deadline: the first call of an operator
# may compile or start threads.
settings.register_profile("blockscale", deadline=None, print_blob=True)
settings.load_profile("blockscale")
