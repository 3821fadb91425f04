"""Shared memory: what is taken never overlaps, comes back, and is seen by other processes until they let go."""

import itertools
import os
import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tenuto.deployments.wire.arena import Arena, MappedArenas, Slot, machine_id

LIMIT = 64 << 16


class ArenaUse(RuleBasedStateMachine):
    """Take, write, hold and give back in any order: what was written stays as it is."""

    @initialize()
    def begin(self) -> None:
        self.arena = Arena(LIMIT)
        self.taken: list[tuple[Slot, bytes]] = []

    @rule(size=st.integers(1, 20 << 16), mark=st.integers(0, 255))
    def take(self, size: int, mark: int) -> None:
        slot = self.arena.take(size)
        if slot is None:
            free = LIMIT - self.arena.used_bytes
            assert free < LIMIT or size > LIMIT
            return
        assert len(slot.data) == size
        pattern = bytes([mark])
        slot.data[:1], slot.data[-1:] = pattern, pattern
        self.taken.append((slot, pattern))

    @precondition(lambda self: self.taken)
    @rule(choice=st.integers(0, 1000))
    def give_back(self, choice: int) -> None:
        slot, _ = self.taken.pop(choice % len(self.taken))
        slot.hold()
        slot.release()
        slot.release()

    @precondition(lambda self: not self.taken)
    @rule()
    def fill(self) -> None:
        whole = self.arena.take(LIMIT)  # nothing is lost to fragments once all is free
        assert whole is not None
        whole.release()

    @invariant()
    def slots_do_not_overlap(self) -> None:
        ends = sorted((slot.offset, slot.offset + len(slot.data)) for slot, _ in getattr(self, "taken", ()))
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
        for slot, pattern in getattr(self, "taken", ()):
            assert bytes(slot.data[:1]) == bytes(slot.data[-1:]) == pattern


ArenaUse.TestCase.settings = settings(stateful_step_count=40)
test_arena_use = ArenaUse.TestCase


def test_a_slot_comes_back_with_its_last_holder() -> None:
    arena = Arena(1 << 20)
    slot = arena.take(10)
    assert slot is not None
    slot.hold()
    slot.release()
    assert arena.used_bytes == 1 << 16
    slot.release()
    assert arena.used_bytes == 0
    arena.close()


PROGRAM = """
import sys
from tenuto.deployments.wire.arena import MappedArenas
mapped = MappedArenas()
for line in sys.stdin:
    arena, offset, length = line.split()
    try:
        print(bytes(mapped.bytes_of(arena, int(offset), int(length))).decode(), flush=True)
    except (OSError, ValueError) as error:
        print(type(error).__name__, flush=True)
"""


def test_another_process_reads_it_without_a_file_that_could_be_left_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    arena = Arena(1 << 20)
    slot = arena.take(6)
    assert slot is not None
    slot.data[:] = b"shared"
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None

        def ask(text: str) -> str:
            print(text, file=reader.stdin, flush=True)
            return reader.stdout.readline().strip()

        assert ask(f"{arena.name} {slot.offset} 6") == "shared"
        slot.data[:] = b"reused"
        assert ask(f"{arena.name} {slot.offset} 6") == "reused"
        assert ask(f"{arena.name} {1 << 20} 6") == "ValueError"
        assert ask(f"{os.getpid()}:0:1 0 6") in ("ValueError", "OSError", "FileNotFoundError", "PermissionError")
        assert ask("../../etc/passwd 0 6") == "ValueError"
        arena.close()
        assert ask(f"{arena.name} {slot.offset} 6") == "reused"  # mapped before
    assert set(os.listdir("/dev/shm")) == before


def test_a_dead_process_arena_cannot_be_mapped() -> None:
    arena = Arena(1 << 20)
    name = arena.name
    arena.close()
    with pytest.raises(OSError, match=r"No such file"):
        MappedArenas().bytes_of(name, 0, 1)


def test_processes_of_this_machine_know_one_another() -> None:
    program = "from tenuto.deployments.wire.arena import machine_id; print(machine_id())"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == machine_id()
