"""The status page of a running job: the report's page, as of now."""

import time
from collections.abc import Callable

from malleus_megatron.pages.page import Frame, make_page
from malleus_megatron.pages.story import Story
from malleus_megatron.sidecar.monitor import Monitor

_FRESH_S = 1.0
"""So long a page is shown to all who ask: drawing a large job takes a part of a second."""


class CachedPage:
    """Draws a page when somebody asks and there is news, and not more often than it makes sense."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is drawn yet; the clock only says how old a page is."""
        self._clock = clock
        self._text = ""
        self._of: tuple[object, ...] = ()
        self._drawn_at = 0.0

    def of(self, monitor: Monitor, *, is_known: bool) -> str:
        """The page of what the monitor has seen."""
        history = monitor.history
        now = self._clock()
        same = self._of[:1] == (history,) and is_known
        if not (same and (self._of[1] == history.version or now - self._drawn_at < _FRESH_S)):
            story = monitor.story()
            self._text = make_page(story, _frame(story, is_known=is_known))
            self._of, self._drawn_at = (history, history.version), now
        return self._text


def _frame(story: Story, *, is_known: bool) -> Frame:
    notes = [] if is_known else ["No job has described itself to this sidecar yet."]
    if story.num_iterations and not (story.step_times or story.losses):
        notes.append("This job does not tell its step times and losses; an older version runs it.")
    shown = story.last_iteration - story.first_iteration + 1
    if shown < story.num_iterations:
        notes.append(f"The last {shown} of {story.num_iterations} iterations are kept here.")
    return Frame(
        title="Malleus: running job", source="Malleus, running job", notes=notes, is_live=True
    )
