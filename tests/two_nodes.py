"""Two nodes on one machine: two network namespaces, joined by a virtual cable.

Each node has its own address, its host name (node0, node1) and a hosts file that lists both. The nodes share disk,
memory and cores. Needs Linux, root and iproute2.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLE = "eth0"  # the interface's name on both nodes


@contextlib.contextmanager
def two_nodes():
    """Yield two nodes. When the block ends, they and all their processes are gone. Raises OSError or CalledProcessError
    if this machine cannot have them."""
    # The process id keeps apart tests that run at the same time.
    names = [f"node{node}-{os.getpid()}" for node in (0, 1)]
    with contextlib.ExitStack() as stack:
        # By default, SIGTERM (from `timeout`, for example) would end this process without cleaning up.
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)))
        for name in names:
            settings = Path("/etc/netns", name)  # `ip netns exec` mounts these files over /etc
            settings.mkdir(parents=True)
            stack.callback(shutil.rmtree, settings)
            hosts = [f"{address} node{node}\n" for node, address in enumerate(ADDRESSES)]
            (settings / "hosts").write_text("127.0.0.1 localhost\n" + "".join(hosts))
            (settings / "resolv.conf").touch()  # no name server: no other name resolves
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)  # which deletes its end of the cable
        # Create both ends inside the namespaces. Outside, they would need two unused names.
        ip("link", "add", CABLE, "netns", names[0], "type", "veth", "peer", "name", CABLE, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-netns", name, "address", "add", f"{address}/24", "dev", CABLE)
            ip("-netns", name, "link", "set", "lo", "up")
            ip("-netns", name, "link", "set", CABLE, "up")
        nodes = TwoNodes(names)
        stack.callback(nodes.kill)
        yield nodes


def ip(*arguments):
    """Run iproute2's `ip`."""
    return subprocess.run(["ip", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


class TwoNodes:
    """Starts processes on the nodes."""

    def __init__(self, names):
        self.names = names

    def torchrun(self, script, *arguments, options=(), timeout=300):
        """Run a real cluster's command, with two processes on each node; gloo listens on the address of the host name.
        Returns each node's finished torchrun, with its output as text. Kills all after `timeout` seconds."""
        # As the pages print it: after a restart, torchrun's store would still list dead processes' addresses.
        torchrun = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]
        torchrun += [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc_per_node", 2]
        torchrun += ["--rdzv_id", 1, "--rdzv_backend", "c10d", "--rdzv_endpoint", f"{ADDRESSES[0]}:29500", *options]
        torchrun += [ROOT / script, *arguments]
        commands = []
        for node, name in enumerate(self.names):
            name_and_run = 'hostname "$0"; exec "$@"'  # each exec replaces the one before it
            inside = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", name_and_run, f"node{node}"]
            commands.append([*inside, *map(str, torchrun)])

        timer = threading.Timer(timeout, self.kill)
        timer.start()
        with ThreadPoolExecutor() as pool:
            try:
                return list(pool.map(partial(subprocess.run, capture_output=True, text=True), commands))
            except BaseException:
                self.kill()
                raise
            finally:
                timer.cancel()

    def kill(self):
        """Kill every process on the nodes, also torchrun's workers, which have their own sessions."""
        while running := [int(pid) for name in self.names for pid in ip("netns", "pids", name).split()]:
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
