"""Two nodes on one machine: two network namespaces joined by a cable, as far as sockets can tell.

Each node has one address of its own, a host name (node0, node1) and a hosts file that knows both. Disk, memory and
cores are shared. Needs Linux, root and iproute2.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLE = "eth0"  # its name on both nodes


class NoNamespacesError(Exception):
    """This machine cannot have two nodes; the text says why."""


@contextlib.contextmanager
def two_nodes():
    """Two nodes that are gone when the block ends, with every process on them. Raises NoNamespacesError."""
    # With this process's id, so that tests which run at the same time do not meet.
    names = [f"node{node}-{os.getpid()}" for node in (0, 1)]
    with contextlib.ExitStack() as cleanup:
        # Left alone, a SIGTERM (of `timeout`, for example) would end this process without any cleaning up.
        cleanup.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)))
        try:
            for name in names:
                settings = Path("/etc/netns", name)  # `ip netns exec` shows its files in place of those in /etc
                settings.mkdir(parents=True)
                cleanup.callback(shutil.rmtree, settings)
                hosts = [f"{address} node{node}\n" for node, address in enumerate(ADDRESSES)]
                (settings / "hosts").write_text("127.0.0.1 localhost\n" + "".join(hosts))
                (settings / "resolv.conf").touch()  # no name server: nothing else has a name
                ip("netns", "add", name)
                cleanup.callback(ip, "netns", "delete", name)  # and its end of the cable
            # Made inside: outside, both ends would need names that nothing else uses.
            ip("link", "add", CABLE, "netns", names[0], "type", "veth", "peer", "name", CABLE, "netns", names[1])
            for name, address in zip(names, ADDRESSES, strict=True):
                ip("-netns", name, "address", "add", f"{address}/24", "dev", CABLE)
                ip("-netns", name, "link", "set", "lo", "up")
                ip("-netns", name, "link", "set", CABLE, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
            raise NoNamespacesError(f"network namespaces cannot be made here ({reason})") from error
        nodes = TwoNodes(names, cleanup.enter_context(tempfile.TemporaryDirectory()))
        cleanup.callback(nodes.kill)
        yield nodes


def ip(*arguments):
    """Run iproute2's `ip`."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


class TwoNodes:
    """Starts processes on the nodes."""

    def __init__(self, names, folder):
        self.names, self.folder = names, folder

    def torchrun(self, script, *arguments, options=(), timeout=300):
        """The command of a real cluster, with two processes on each node. gloo listens on the address that the host's
        own name has. Returns the finished torchrun of each node, output as text; killed after `timeout` seconds."""
        # As printed: after a restart torchrun's own store would still have the addresses of dead processes.
        torchrun = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]
        torchrun += [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc_per_node", 2]
        torchrun += ["--rdzv_id", 1, "--rdzv_backend", "c10d", "--rdzv_endpoint", f"{ADDRESSES[0]}:29500", *options]
        torchrun += [ROOT / script, *arguments]
        processes = []
        for node, name in enumerate(self.names):
            name_and_run = 'hostname "$0"; exec "$@"'  # each exec replaces the one before it
            inside = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", name_and_run, f"node{node}"]
            # Into files: of several pipes, one could fill up while another is read.
            with open(f"{self.folder}/stdout{node}", "w") as stdout, open(f"{self.folder}/stderr{node}", "w") as stderr:
                processes.append(subprocess.Popen([*inside, *map(str, torchrun)], stdout=stdout, stderr=stderr))

        deadline = time.monotonic() + timeout
        try:
            for process in processes:
                process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
        finished = []
        for node, process in enumerate(processes):
            texts = [Path(self.folder, f"{stream}{node}").read_text() for stream in ("stdout", "stderr")]
            finished.append(subprocess.CompletedProcess(process.args, process.wait(), *texts))
        return finished

    def kill(self):
        """Kill every process on the nodes. By node: torchrun's workers are in sessions of their own."""
        while running := [int(pid) for name in self.names for pid in ip("netns", "pids", name).split()]:
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
