"""The threads of a server."""

from __future__ import annotations

import threading

import pytest
import torch

from microtome.errors import Unsupported
from microtome.remote import protocol
from microtome.remote.gate import Gate
from microtome.remote.payloads import pack_output
from microtome.remote.worker import QueuedRequest
from microtome.split.analysis.structure_spec import flatten


def test_a_resolved_request_holds_no_data() -> None:
    request = QueuedRequest(protocol.Request(id="a"), memoryview(b"a boundary that cannot be decoded"))
    held: list[object] = []
    request.reply.add_done_callback(lambda _: held.append(request.data))  # the reservation is released here
    request.resolve(b"")
    assert held == [None]


def test_who_wants_to_be_alone_is_let_in_though_others_never_pause() -> None:
    gate, stop, inside = Gate(), threading.Event(), threading.Semaphore(0)

    def work() -> None:
        while not stop.is_set():
            with gate.shared():
                inside.release()
                stop.wait(0.002)

    def alone() -> None:
        with gate.exclusive():
            pass

    workers = [threading.Thread(target=work) for _ in range(2)]
    waits = threading.Thread(target=alone, daemon=True)
    for thread in workers:
        thread.start()
    for _ in workers:
        inside.acquire()
    waits.start()
    waits.join(120)
    entered = not waits.is_alive()
    stop.set()
    for thread in workers:
        thread.join()
    assert entered


def test_an_output_that_cannot_be_sent_says_what_to_do() -> None:
    spec, _, _ = flatten(torch.ones(1))
    with pytest.raises(Unsupported, match=r"returns a lock, which cannot be sent: .*Pass use_cache=False"):
        pack_output(threading.Lock(), spec, "", "")
