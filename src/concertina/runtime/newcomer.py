"""A newcomer's way into the loop over the data: a rehearsal, then beside the others until they let it in."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from concertina.runtime.catch_up import CatchUp
from concertina.runtime.course import Course
from concertina.runtime.data import Feed
from concertina.runtime.follow import Follower
from concertina.runtime.member import Member
from concertina.runtime.rehearsal import rehearse
from concertina.runtime.story import Story
from concertina.runtime.together import Together
from concertina.runtime.wishes import Wishes

if TYPE_CHECKING:
    from concertina.runtime.loader import SessionLoader


class Newcomer:
    """What a worker is until it takes turns."""

    def __init__(self, member: Member, course: Course, wishes: Wishes, story: Story) -> None:
        self._member = member
        self._course = course
        self._wishes = wishes
        self._story = story
        self._rehearsed = False
        self._follower = Follower(member.engine, member.membership, member.elastic, member.desk, member.prepared)
        self._follower.on_synced = self._tell_of_catching_up

    def wait_for_the_others(self) -> None:
        """Everything of the script before its loop is done."""
        self._story.events.emit("ready")
        self._course.epoch = self._follower.wait_until_let_in()
        self._story.events.emit("following", epoch=self._course.epoch)

    def _tell_of_catching_up(self, catch_up: CatchUp | Together | None) -> None:
        events, follower = self._story.events, self._follower
        if catch_up is None:
            events.emit("handed_over", reason=follower.handed_over)
            return
        events.emit("copied", at=catch_up.copied_at, bytes=catch_up.copied_bytes)
        events.emit("synced", replayed=catch_up.replayed, differing=catch_up.differing, **follower.told)

    def rehearse(self, loader: "SessionLoader") -> Iterator[Any]:
        """Once, in the loop over data with an order that it comes to first."""
        if self._rehearsed or not isinstance(loader.feed, Feed):
            return
        self._rehearsed = True
        yield from rehearse(self._member.engine, loader.feed)
        self._story.events.emit("rehearsed")

    def follow(self, loader: "SessionLoader") -> bool:
        """Whether this newcomer trains from here on; False if the others are in another pass."""
        member, course = self._member, self._course
        member.search_once()
        rest = self._follower.follow(course.epoch, loader.number, loader.passes)
        if rest is None:
            return False
        self._wishes.begin_anew(rest["stop"])
        course.join(rest, member.workers)
        member.stands_at(course.step)
        member.elastic.point_batch = loader.index
        return True

    def tell_of_arrival(self) -> None:
        course, follower = self._course, self._follower
        told = {"late": follower.late, "replayed": follower.replayed}
        self._story.events.emit("training", step=course.step, epoch=course.epoch, **told)
        self._story.generation("joined_generation", self._member)
