"""A real Jupyter kernel for tests: run cells, send comm messages, press the stop button.

Knows jupyter_client. Knows nothing about browsers or about what the cells import. Nothing here
waits by sleeping: every wait reads messages until the wanted one came, and gives up at a deadline.

    with Kernel() as kernel:
        cell = kernel.run("print(1 + 1)")
        assert cell.ok and cell.text == "2\n"
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import KernelManager

TIMEOUT = 60.0
"""Seconds after which a wait fails; far more than anything here takes."""

Message = dict[str, Any]


class _ThisPython(KernelSpecManager):
    """The kernel of the running interpreter, whatever is installed elsewhere."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name=kernel_name, language="python")


@dataclass
class Cell:
    """What came back for one execute request (or comm message): the IOPub messages, in order."""

    msg_id: str
    messages: list[Message] = field(default_factory=list)
    reply: Message | None = None

    def of_type(self, *types: str) -> list[Message]:
        return [message for message in self.messages if message["msg_type"] in types]

    @property
    def idle(self) -> bool:
        states = [message["content"]["execution_state"] for message in self.of_type("status")]
        return "idle" in states

    @property
    def ok(self) -> bool:
        return self.reply is not None and self.reply["content"]["status"] == "ok"

    @property
    def error(self) -> str:
        """Name of the exception that the cell showed; "" if there was none."""
        errors = self.of_type("error")
        return str(errors[-1]["content"]["ename"]) if errors else ""

    @property
    def text(self) -> str:
        """All that the cell printed to standard output."""
        streams = [message["content"] for message in self.of_type("stream")]
        return "".join(stream["text"] for stream in streams if stream["name"] == "stdout")

    @property
    def displays(self) -> list[Message]:
        """Contents of what was displayed, updates included."""
        types = ("display_data", "update_display_data", "execute_result")
        return [message["content"] for message in self.of_type(*types)]

    def describe(self) -> str:
        """For assertion messages: everything that explains a failed cell."""
        errors = ["\n".join(message["content"]["traceback"]) for message in self.of_type("error")]
        streams = [message["content"]["text"] for message in self.of_type("stream")]
        return "\n".join([f"reply: {self.reply and self.reply['content']}", *streams, *errors])


class Kernel:
    """One kernel process with one torch thread and an empty working folder of its own."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self._folder = folder
        self._environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "IPYTHONDIR": str(folder / "ipython"),
            "JUPYTER_RUNTIME_DIR": str(folder),
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        self._log = folder / "kernel.log"
        self._cells: dict[str, Cell] = {}

    def __enter__(self) -> Kernel:
        self._manager = KernelManager(kernel_spec_manager=_ThisPython())
        with self._log.open("wb") as log:
            self._manager.start_kernel(env=self._environment, cwd=str(self._folder), stdout=log, stderr=log)
        self._client: BlockingKernelClient = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=TIMEOUT)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    @property
    def alive(self) -> bool:
        return bool(self._manager.is_alive())

    @property
    def pid(self) -> int:
        pid = self._manager.provisioner.pid  # type: ignore[union-attr]
        assert isinstance(pid, int)
        return pid

    # Cells

    def start(self, code: str, subshell: str | None = None) -> Cell:
        """Send a cell (to a subshell, if one is named) and return at once; see `finish`."""
        content = {"code": code, "silent": False, "allow_stdin": False, "stop_on_error": False}
        return self._cell(self._send("execute_request", content, subshell))

    def finish(self, cell: Cell, timeout: float = TIMEOUT) -> Cell:
        """Wait until the kernel has answered the cell and published all that belongs to it."""
        self.wait_until(lambda: cell.idle and cell.reply is not None, timeout, cell)
        return cell

    def run(self, code: str, timeout: float = TIMEOUT) -> Cell:
        """Run a cell to its end, whatever the end is."""
        return self.finish(self.start(code), timeout)

    def run_ok(self, code: str, timeout: float = TIMEOUT) -> Cell:
        """Run a cell that has to succeed."""
        cell = self.run(code, timeout)
        assert cell.ok, cell.describe()
        return cell

    def new_subshell(self) -> str:
        """Start a second shell, a thread of the kernel that runs cells beside the main one."""
        request = self._client.session.msg("create_subshell_request")
        self._client.control_channel.send(request)
        while True:  # get_control_msg raises queue.Empty when nothing comes
            reply = self._client.get_control_msg(timeout=TIMEOUT)
            if _parent_id(reply) == request["header"]["msg_id"]:
                return str(reply["content"]["subshell_id"])

    # Widgets

    def open_comm(self, target: str, comm_id: str) -> Cell:
        """Open a comm from the side of the browser."""
        content = {"comm_id": comm_id, "target_name": target, "data": {}}
        return self._cell(self._send("comm_open", content))

    def send_comm(self, comm_id: str, data: dict[str, Any]) -> Cell:
        """Send a custom message, as a widget's front end does."""
        return self._cell(self._send("comm_msg", {"comm_id": comm_id, "data": data}))

    def _send(self, msg_type: str, content: dict[str, Any], subshell: str | None = None) -> str:
        message = self._client.session.msg(msg_type, content)
        if subshell is not None:
            message["header"]["subshell_id"] = subshell
        self._client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    # The stop button

    def interrupt(self) -> None:
        """Press the stop button: SIGINT to the kernel's process."""
        self.signal(signal.SIGINT)

    def signal(self, number: signal.Signals) -> None:
        """Send any signal, for cells that wait for one."""
        os.kill(self.pid, number)

    # Messages

    def wait_for_text(self, cell: Cell, text: str, timeout: float = TIMEOUT) -> None:
        """Wait until the cell has printed `text`."""
        self.wait_until(lambda: text in cell.text, timeout, cell)

    def wait_until(
        self, reached: Callable[[], bool], timeout: float = TIMEOUT, cell: Cell | None = None
    ) -> None:
        """Read messages until `reached()`; fails after `timeout` seconds and if the kernel dies."""
        deadline = time.monotonic() + timeout
        while not reached():
            about = f"; {cell.describe()}" if cell is not None else ""
            assert time.monotonic() < deadline, f"no answer within {timeout:g} s{about}"
            assert self.alive, f"the kernel died: {self._log.read_text()}{about}"
            self._read_one(0.02)

    def read_for(self, seconds: float) -> None:
        """Let time pass, to press the button at some moment."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._read_one(left)

    def _read_one(self, seconds: float) -> None:
        """Take in all replies and at most one IOPub message, for which it waits `seconds`."""
        self._take_replies()
        try:
            message = self._client.get_iopub_msg(timeout=seconds)
        except queue.Empty:
            return
        self._cell(_parent_id(message)).messages.append(message)

    def _take_replies(self) -> None:
        while self._client.shell_channel.msg_ready():
            message = self._client.get_shell_msg(timeout=0)
            self._cell(_parent_id(message)).reply = message

    def _cell(self, msg_id: str) -> Cell:
        return self._cells.setdefault(msg_id, Cell(msg_id))


def _parent_id(message: Message) -> str:
    return str(message["parent_header"].get("msg_id", ""))
