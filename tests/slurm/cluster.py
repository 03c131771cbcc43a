"""A real SLURM of several nodes on this machine, for tests: nothing outside its folder is written.

Each node is one slurmd in Linux namespaces of its own (processes, mounts, host name, shared memory, and the network
where that is allowed), so that MPI sees separate hosts with a network between them. No systemd, no control groups,
no accounting. Needs root, and Debian's slurmctld, slurmd, slurm-client and munge.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import socket
import subprocess
import time

SBIN = "/usr/sbin:/sbin"  # Debian's daemons are there, and PATH may lack it
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "unshare", "setpriv")
# A process whose parent dies is killed, so that no daemon outlives a killed test; within one namespace of processes.
TIED = ("setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc")
START_SECONDS = 20
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL")
CONF = """\
ClusterName=tests
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdSpoolDir={folder}/spool/%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/log/slurmd-%n.log
TmpFS={folder}/spool/%n/tmp
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=2
KillWait=30
SlurmdTimeout=15
ReturnToService=2
MinJobAge=3600
JobRequeue=1
"""


def missing():
    """Why no cluster can be started here, or ""."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ['PATH']}:{SBIN}")]
    if absent:
        return f"not installed: {' '.join(absent)} (Debian: slurmctld slurmd slurm-client munge)"
    if subprocess.run([*TIED, "--uts", "--ipc", "true"], capture_output=True).returncode:
        return "the kernel does not allow namespaces"
    return ""


@dataclasses.dataclass(frozen=True)
class Job:
    """A job that has ended, or is in the state that was waited for.

    Attributes:
        number: its id. state: in SLURM's words. code: exit code of its script; 128 + signal if a signal ended it.
        log: what it printed. fields: what scontrol says of it, name -> text.
    """

    number: str
    state: str
    code: int
    log: str
    fields: dict


class Cluster:
    """A running SLURM; `stop` ends it with all its jobs.

    Args:
        folder: an empty `pathlib.Path` with a short name: the paths of sockets are limited to 107 characters.
        num_nodes: n1, n2, ... with 8 CPUs each, however many there are.

    Attributes:
        environment: variables of the processes that use the cluster. network: whether nodes have networks of their own.
    """

    def __init__(self, folder, num_nodes=2):
        self.folder, self.nodes = folder, [f"n{number}" for number in range(1, num_nodes + 1)]
        self._path = f"{os.environ['PATH']}:{SBIN}"
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": self._path}
        self._daemons, self._bridge = {}, f"fm{os.getpid()}"
        self.network = self._open_network()
        try:
            self._configure()
            self._start()
        except BaseException:
            self.stop()
            raise

    def _open_network(self):
        """Give each node a network namespace of its own on a common bridge; false where that is not allowed."""
        self._remove_leftovers()
        subnet = f"198.18.{os.getpid() % 250}"  # for tests of networks, RFC 2544
        self._address, self._addresses = f"{subnet}.1", {n: f"{subnet}.{10 + i}" for i, n in enumerate(self.nodes)}
        commands = [f"link add {self._bridge} type bridge", f"addr add {self._address}/24 dev {self._bridge}"]
        commands.append(f"link set {self._bridge} up")
        for node in self.nodes:
            space, inside = f"{self._bridge}{node}", f"-n {self._bridge}{node}"
            commands += [f"netns add {space}", f"link add {space} type veth peer name eth0 netns {space}"]
            commands += [f"link set {space} master {self._bridge}", f"link set {space} up"]
            commands += [f"{inside} addr add {self._addresses[node]}/24 dev eth0"]
            commands += [f"{inside} link set eth0 up", f"{inside} link set lo up"]
        if shutil.which("ip", path=self._path) and all(map(self._ip, commands)):
            return True
        self._close_network()
        self._address, self._addresses = "127.0.0.1", dict.fromkeys(self.nodes, "127.0.0.1")
        return False

    def _remove_leftovers(self):
        """Remove the networks of tests that were killed."""
        for path in pathlib.Path("/run/netns").glob("fm*n*"):
            bridge = path.name.partition("n")[0]
            if not pathlib.Path(f"/proc/{bridge[2:]}").exists():
                self._ip(f"netns del {path.name}")
                self._ip(f"link del {bridge}")

    def _ip(self, words):
        done = subprocess.run(["ip", *words.split()], capture_output=True, env={"PATH": self._path})
        return done.returncode == 0

    def _close_network(self):
        for node in self.nodes:
            self._ip(f"netns del {self._bridge}{node}")
        self._ip(f"link del {self._bridge}")

    def throttle(self, rate):
        """Limit what every node sends to `rate`, in tc's words ("1gbit"); needs `network`."""
        for node in self.nodes:
            words = f"tc -n {self._bridge}{node} qdisc replace dev eth0 root tbf rate {rate} burst 512kb latency 50ms"
            subprocess.run(words.split(), check=True, capture_output=True, env={"PATH": self._path})

    def unthrottle(self):
        """Remove the limit of `throttle`."""
        for node in self.nodes:
            words = f"tc -n {self._bridge}{node} qdisc del dev eth0 root"
            subprocess.run(words.split(), capture_output=True, env={"PATH": self._path})

    def _configure(self):
        folder, host = self.folder, socket.gethostname().partition(".")[0]
        folder.chmod(0o755)
        for name in ("munge", "state", "log", "spool"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "munge").chmod(0o711)  # munged wants a socket folder that all may enter, and a key that none may read
        key = folder / "munge" / "key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        ports = free_ports(1 + len(self.nodes))
        lines = [CONF.format(host=host, address=self._address, port=ports[0], folder=folder)]
        hosts = [pathlib.Path("/etc/hosts").read_text()]
        for node, port in zip(self.nodes, ports[1:]):
            (folder / "spool" / node / "tmp").mkdir(parents=True)  # the PMIx plugin makes folders of one name in it
            address = self._addresses[node]
            hosts.append(f"{address} {node}\n")
            lines.append(f"NodeName={node} NodeAddr={address} Port={port} CPUs=8 RealMemory=65536\n")
        lines.append(f"PartitionName=tests Nodes=n[1-{len(self.nodes)}] Default=YES MaxTime=INFINITE State=UP\n")
        (folder / "hosts").write_text("".join(hosts))
        (folder / "slurm.conf").write_text("".join(lines))

    def _start(self):
        folder, munge = self.folder, self.folder / "munge"
        words = ["munged", "--foreground", "--num-threads=4", f"--key-file={munge / 'key'}"]
        words += [f"--socket={munge / 'socket'}", f"--pid-file={munge / 'pid'}", f"--seed-file={munge / 'seed'}"]
        self._daemon("munged", [*TIED, *words, f"--log-file={munge / 'log'}"])
        self._wait("munged", (munge / "socket").exists)
        self._daemon("slurmctld", [*TIED, "slurmctld", "-D", "-f", folder / "slurm.conf"])
        self._wait("slurmctld", lambda: "UP" in self.run("scontrol", "ping"))
        for node in self.nodes:
            self._start_slurmd(node)
        for node in self.nodes:
            self._wait_for_node(node)

    def start_node(self, node):
        """Start a node again after `lose`."""
        self._start_slurmd(node)
        self._wait_for_node(node)  # it is down until its slurmd has said that it is there

    def lose(self, node):
        """End a node at once with everything that runs on it, as a power failure does."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")  # it would notice in 15 s

    def _start_slurmd(self, node):
        # The bash is the first process of the node's namespace: it collects the dead that slurmd leaves behind.
        inside = 'hostname "$1" && mount -t tmpfs -o mode=1777 tmpfs /dev/shm && mount --bind "$2" /etc/hosts'
        inside += ' && shift 2 && { "$@" & wait $!; }'
        space = ["nsenter", f"--net=/run/netns/{self._bridge}{node}"] if self.network else []
        slurmd = ["slurmd", "-D", "-f", self.folder / "slurm.conf", "-N", node]
        wrap = [*TIED, "--uts", "--ipc", "bash", "-c", inside, "node", node, self.folder / "hosts"]
        self._daemon(node, [*space, *wrap, *slurmd])

    def _wait_for_node(self, node):
        self._wait(node, lambda: self.run("sinfo", "-h", "-n", node, "-o", "%T").strip() == "idle")

    def _daemon(self, name, words):
        environment = {key: text for key, text in self.environment.items() if not key.startswith("SLURM_")}
        with open(self.folder / "log" / f"{name}.out", "wb") as log:
            self._daemons[name] = subprocess.Popen(
                [str(word) for word in words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def _wait(self, name, is_up):
        until = time.monotonic() + START_SECONDS
        while not is_up():
            if time.monotonic() > until:
                logs = "".join(path.read_text(errors="replace")[-2000:] for path in self.folder.glob(f"log/*{name}*"))
                raise RuntimeError(f"{name} did not start:\n{logs}")
            time.sleep(0.05)

    def stop(self):
        """End all daemons and jobs."""
        for daemon in reversed(self._daemons.values()):
            daemon.kill()  # takes all processes in its namespace with it
            daemon.wait()
        self._close_network()

    def run(self, *words, check=False, **variables):
        """What a command of SLURM prints."""
        done = subprocess.run(
            [str(word) for word in words], capture_output=True, text=True, timeout=60, check=check,
            env={**self.environment, **variables},
        )  # fmt: skip
        return done.stdout

    def submit(self, folder, script, *words, options=(), **variables):
        """Submit a job script with its arguments; its log is `folder`/JOBID.out. Returns its id."""
        words = ["--parsable", f"--chdir={folder}", f"--output={folder}/%j.out", "--time=10", *options, script, *words]
        done = subprocess.run(
            ["sbatch", *map(str, words)], capture_output=True, text=True, timeout=60, cwd=folder,
            env={**self.environment, **variables},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def until(self, number, condition, seconds=240):
        """Return when `condition()` is true; a failing test if it is not before the job has ended, or for too long."""
        end = time.monotonic() + seconds
        while True:
            fields = self.fields(number)
            if condition():  # asked after the state: what a job does last is seen
                return
            if fields.get("JobState") in ENDED or time.monotonic() > end:
                self._give_up(number, fields)
            time.sleep(0.1)

    def _give_up(self, number, fields):
        self.run("scancel", number)
        text = f"restarts {fields.get('Restarts')}, reason {fields.get('Reason')}, exit code {fields.get('ExitCode')}"
        raise AssertionError(f"job {number} is {fields.get('JobState')} ({text}):\n{_read(fields)}")

    def fields(self, number):
        """What scontrol says of a job: name -> text."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "-o", "show", "job", number)))

    def wait(self, number, states=ENDED, seconds=240):
        """The `Job` once it is in one of some states; a failing test if it takes too long."""
        until = time.monotonic() + seconds
        while (fields := self.fields(number)).get("JobState") not in states:
            if time.monotonic() > until:
                self._give_up(number, fields)
            time.sleep(0.1)
        code, _, by_signal = fields["ExitCode"].partition(":")
        return Job(number, fields["JobState"], int(code) or (128 + int(by_signal) if by_signal != "0" else 0),
                   _read(fields), fields)  # fmt: skip

    def let_run_again(self, number, restarts):
        """Return when a requeued job runs for the time after `restarts` requeues: SLURM alone waits two minutes."""
        requeued = {"JobState": "PENDING", "Restarts": str(restarts)}
        self.until(number, lambda: requeued.items() <= self.fields(number).items())
        # Not at once: a node takes no credential of the second in which it received the order to end this job.
        self.run("scontrol", "update", f"JobId={number}", "StartTime=now+2", check=True)
        self.until(number, lambda: self.fields(number).get("JobState") == "RUNNING")
        assert self.fields(number)["Restarts"] == str(restarts)

    def processes(self, word):
        """Ids of the nodes' processes that have a word in their command line."""
        found = set()
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if word.encode() in path.read_bytes():
                    found.add(int(path.parent.name))
        return found - {os.getpid()}


def _read(fields):
    path = pathlib.Path(fields.get("StdOut", "/nowhere"))
    return path.read_text(errors="replace") if path.is_file() else ""


def free_ports(number):
    """That many ports that no process listens on."""
    sockets = [socket.create_server(("", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
