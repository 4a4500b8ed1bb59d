"""The steps of `make acceptance`: frozen data. What each does is in `checks`, by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Needs = Literal["local", "account", "gpu", "two gpus"]
# desk: nothing is made. head: a head alone. machine, machines: one and two machines without GPUs. gpu, gpus: one and
# two machines of the cluster's own pools. moved: two of these, with the other `network.placement`. end: always done.
Stage = Literal["desk", "head", "machine", "machines", "gpu", "gpus", "moved", "end"]

STAGES: tuple[Stage, ...] = get_args(Stage)
MACHINES: dict[Stage, int] = {"machine": 1, "machines": 2, "gpu": 1, "gpus": 2, "moved": 2}  # without the head
PATIENCE = 3.0  # a step may take this many times its usual length


@dataclass(frozen=True)
class Step:
    """One step: what is tried, and what that shows."""

    name: str  # as reports and checks call it
    stage: Stage  # when it is done, and with how many machines
    needs: Needs  # what the cluster must have for it
    proves: str  # what is true if it passes
    minutes: float  # how long it usually takes
    remedy: str  # what to do if it fails
    gate: bool = False  # if it fails, the rest of its stage is not run
    sets_up: tuple[Stage, ...] = ()  # the stages whose cluster it brings up; a new run repeats it before their steps
    clouds: tuple[str, ...] = ()  # where it can be tried; empty: everywhere
    job: str = ""  # the job of `jobs.plans` whose results it reads

    @property
    def limit(self) -> float:
        """Seconds that it may take."""
        return 60 * self.minutes * PATIENCE


# Remedies that several steps have.
_PAUSE = "the parts of the pause in the report say where the time went"
_TERRAFORM = "Terraform's messages are on stderr"

STEPS: tuple[Step, ...] = (
    Step("tools", "desk", "account", "this computer has the programs that the cloud needs", 0.5,
         "install the program that the reason names"),
    Step("login", "desk", "account", "the cloud accepts the credentials here", 0.2,
         "sign in as the reason says"),
    Step("permissions", "desk", "account", "you may make all that is in the stacks; nothing is made", 0.5,
         "have an administrator grant what the reason names: section 3 of docs/gcp.md and docs/aws.md"),
    Step("offers", "desk", "account", "each zone has the machine types of its pools", 0.5,
         "take a zone that the reason names; on AWS, letters of zones differ from account to account"),
    Step("quotas", "desk", "account",
         "each pool can have at least one machine within the quotas, the first steps two small ones", 0.5,
         "ask for more, or lower max: section 2 of docs/gcp.md and docs/aws.md"),
    Step("image", "desk", "account", "the image that the machines boot from is there", 1,
         "bake one with `make image CLUSTER=…`: docs/images.md"),
    Step("plan", "desk", "account", "Terraform and its provider accept the stacks", 2,
         "Terraform's own messages are on stderr; report them if the cluster file is one of the samples"),

    Step("up", "head", "local", "a head comes up, finds the bucket and answers", 6,
         "the console of the head's machine says why: section 11 of docs/gcp.md and docs/aws.md", gate=True,
         sets_up=("head", "machine", "machines")),
    Step("ways in", "head", "local", "the head is reached by `make status`, `make run` and `make ssh`", 0.5,
         "the reason is the tool's own: the roles for SSH, the firewall, the image's SSH server", gate=True),
    Step("host keys", "head", "local", "a head with another host key is refused", 0.2,
         "report this: SSH to the head has no other protection"),
    Step("grants", "head", "account", "the head has retried what was refused before its rights took effect", 0.2,
         "the head's journal has the refusals: `make run NODE=head CMD='journalctl -u spotrun-head'`"),
    Step("guest agent", "head", "account", "Google's guest agent leaves the host key as the machine published it", 0.2,
         "set_host_keys must be false in the image's instance_configs.cfg: bake the image again", clouds=("gcp",)),
    Step("instance connect", "head", "account", "EC2 Instance Connect's scripts work on Debian", 0.2,
         "sshd's journal on the head names the script that failed: report it with the image's manifest",
         clouds=("aws",)),

    Step("join", "machine", "local", "a machine boots, joins and trains; the report has the seconds of each part", 5,
         "`make status` names the pool's problem; a zone without machines may have some later", gate=True,
         job="single"),
    Step("gate", "machine", "local", "the machine passes every line of the health gate", 0.2,
         "the reason is the health gate's own line; docs/images.md says what an image must have", job="single"),
    Step("node ssh", "machine", "local", "a node is reached through the head, by `make run` and `make ssh`", 0.2,
         "the firewall between head and nodes, or the node's host key in the bucket", job="single"),
    Step("notice", "machine", "local", "a machine that is alone is taken with notice: no step is lost", 4,
         "the events in the report say what the agent saw; `make logs` has what the worker did", job="single"),
    Step("replacement", "machine", "local", "another machine replaces the one that was taken, and trains on", 0.2,
         "`make status` names the pool's problem", job="single"),
    Step("notice order", "machine", "account",
         "which metadata value changes first at a preemption: preempted or maintenance-event", 0.2,
         "if `preempted` never came, the simulated event is not a preemption: report it", clouds=("gcp",),
         job="single"),
    Step("shutdown budget", "machine", "account", "2 GiB of state reach the bucket before a notice ends", 8,
         "the notice is too short for such a state: shorten checkpoint_interval", job="large"),
    Step("disk encryption", "machine", "account",
         "machines start with disks under the account's default KMS key, which the report names", 0.2,
         "grant the key to the role AWSServiceRoleForAutoScaling", clouds=("aws",)),

    Step("reference", "machines", "local", "two machines train to the end without a disturbance", 4,
         "`make logs` has what the workers said; the nodes' firewall must let nodes reach each other", gate=True,
         job="reference"),
    Step("preempt", "machines", "local", "one of two machines is taken with notice: no step is lost", 5,
         _PAUSE, job="faults"),
    Step("kill", "machines", "local", "one of two machines is taken without notice: training goes on", 1,
         _PAUSE, job="faults"),
    Step("equality", "machines", "local", "the disturbed run ends with the state of the undisturbed run", 0.1,
         "report both digests: a step was lost or done twice", job="faults"),

    Step("gpu up", "gpu", "gpu", "the cluster has the pools of its own file now", 3,
         _TERRAFORM, gate=True, sets_up=("gpu", "gpus")),
    Step("flex template", "gpu", "gpu", "Google has the templates of flex pools as Flex-start ones, not as dearer ones",
         0.2, "remove the flex pools from the cluster file, and report the version of Terraform's provider", gate=True,
         clouds=("gcp",)),
    Step("gpu gate", "gpu", "gpu", "driver, GPUs and adapters pass every line of the health gate", 8,
         "the reason is the health gate's own line; docs/images.md says what an image must have", gate=True, job="gpu"),
    Step("matrix product", "gpu", "gpu", "bf16 products and memory are as fast as the type's known figures", 1,
         "another GPU of the type may be fine; `nvidia-smi -q -d PERFORMANCE` says what slows this one", job="gpu"),
    Step("snapshot copy", "gpu", "gpu", "a snapshot leaves the GPU at the speed of the bus", 1,
         "at less than half of the usual speed, the link is bad: `nvidia-smi -q` shows its width", job="gpu"),
    Step("fork server", "gpu", "gpu", "workers are forked from a server that has torch, and use CUDA", 0.5,
         "an import of the job initialises CUDA: the launcher's log names it", job="gpu"),
    Step("gpu tests", "gpu", "gpu", "the tests that other computers skip pass (`make test-gpu`)", 6,
         "the failing tests are in the job's log", job="gpu tests"),
    Step("efa layout", "gpu", "gpu", "one machine has all its EFAs, and NCCL can use them", 0.2,
         "the gate's line names what is missing; do not start more machines before that is right", clouds=("aws",),
         job="gpu"),

    Step("all-reduce", "gpus", "two gpus", "NCCL works between two machines; the report names transport and speed", 6,
         "the transport in the reason is NCCL's own: docs/aws.md and docs/gcp.md say what it should be", gate=True,
         job="gpu pair"),
    Step("vit", "gpus", "two gpus", "examples/vit trains on two machines; the report has the samples a second", 4,
         "`make logs` has the trace", job="gpu vit"),
    Step("gpu reference", "gpus", "two gpus", "two GPU machines train to the end without a disturbance", 2,
         "`make logs` has what the workers said", job="gpu reference"),
    Step("gpu preempt", "gpus", "two gpus", "one of two GPU machines is taken with notice: no step is lost", 8,
         _PAUSE, job="gpu faults"),
    Step("gpu kill", "gpus", "two gpus", "one of two GPU machines is taken without notice: training goes on", 6,
         _PAUSE, job="gpu faults"),
    Step("state transfer", "gpus", "two gpus", "a newcomer gets 4 GB of state; the report has the rate", 0.1,
         "if it is a tenth of the all-reduce's, the zones differ or the interface is wrong", job="gpu faults"),
    Step("nccl segments", "gpus", "two gpus", "no shared memory of NCCL is left by workers that were killed", 0.1,
         "`make run CMD='ls -l /dev/shm'` shows the files; report them with the agent's log", job="gpu faults"),
    Step("gpu equality", "gpus", "two gpus", "with one GPU a machine, the disturbed run ends with the same state", 0.1,
         "report both digests: a step was lost or done twice", job="gpu faults"),
    Step("maintenance notice", "gpus", "gpu", "a machine with an hour of notice before maintenance trains on", 8,
         "the events in the report say what the agent saw; `make logs` has what the metadata server said",
         clouds=("gcp",), job="gpu maintenance"),

    Step("moved up", "moved", "two gpus", "a change of network.placement takes effect", 3,
         _TERRAFORM, gate=True, sets_up=("moved",)),
    Step("placement", "moved", "two gpus", "the report has the speed with network.placement and without it", 6,
         "without capacity for placed machines, set network.placement: false", job="moved pair"),

    Step("down", "end", "local", "the machines, the head and what belongs to them are gone", 5,
         "run `make down CLUSTER=… FORCE=1` again; until then the head costs money"),
    Step("left", "end", "local",
         "nothing unexpected carries the cluster's label; what stays is listed with its price", 1,
         "remove what the reason names, in the cloud's console"),
)  # fmt: skip
