"""Terraform for a cluster in a cloud: synthesize its two stacks, show what would change, apply, destroy.

`make plan`, `make up` and `make down` run Terraform on what `python -m infra` writes: what `cdktf diff|deploy|destroy`
do as well, on the same state, but with nothing to install from npm. These commands also refuse: see `site` and
`cloud_site`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from scripts import console, programs
from spotrun.errors import CloudError, SpotrunError
from spotrun.spec import ClusterSpec
from spotrun.spec.names import HEAD, group

Stack = Literal["base", "pools"]
TERRAFORM = (1, 10)  # the oldest that locks state in S3 without a table (use_lockfile)
NODE = (20,)  # the oldest Node.js that CDKTF's runtime is tested with
_ROOT = Path(__file__).parent.parent
_SYNTH = 300.0  # seconds
_PLAN = ("plan", "-input=false", "-detailed-exitcode")
# Of the bucket that stack base makes: the cloud, its URLs' scheme, and what Terraform calls its region and its name.
_BUCKETS = {
    "aws_s3_bucket": ("aws", "s3", "region", "bucket"),
    "google_storage_bucket": ("gcp", "gs", "location", "name"),
}
_CALLER = "aws_caller_identity"  # what Terraform calls the account whose credentials it has
_LOCKED = re.compile(r"Error acquiring the state lock.*?\bID: +(\S+)", re.DOTALL)
_GROUPS = ("aws_autoscaling_group", "google_compute_instance_group_manager")


@dataclass(frozen=True)
class Place:
    """Where a cluster stands. bucket: its URL. project: Google's alone. account: AWS's alone; None: not known."""

    cloud: str
    region: str
    bucket: str
    project: str | None = None
    account: str | None = None


@dataclass(frozen=True)
class Stacks:
    """The synthesized stacks of a cluster."""

    cluster: str
    folder: Path
    _ready: set[Stack] = field(default_factory=set, repr=False, compare=False)

    def plan(self) -> bool:
        """Print what would change. Returns whether anything would. Stack pools looks up what stack base makes."""
        changes = self._terraform("base", *_PLAN, good=(0, 2)) == 2
        if changes and not self.exists("base"):
            code = 1
        else:
            code = self._terraform("pools", *_PLAN, good=(0, 1, 2) if changes else (0, 2))
        if code == 1:
            console.warn("spotrun: stack pools can be planned when stack base is up to date")
        return changes or code == 2

    def apply(self) -> None:
        """Make the cloud have what the stacks say. Raises `CloudError`."""
        for stack in get_args(Stack):
            self._terraform(stack, "apply", "-input=false", "-auto-approve")

    def destroy(self, stack: Stack) -> None:
        """Remove what a stack has made. Raises `CloudError`; the next try goes on from there.

        Without a refresh: what a stack looks up (its image, say) may be gone, and that must not keep machines running.
        """
        self._terraform(stack, "destroy", "-input=false", "-auto-approve", "-refresh=false")

    def exists(self, stack: Stack) -> bool:
        """Whether Terraform's state has anything of a stack."""
        return any(resource["mode"] == "managed" for resource in self._state(stack))

    def has_head(self) -> bool:
        """Whether Terraform's state has the head's group. Without a head, no job of the cluster runs."""
        groups = [each for each in self._state("pools") if each["mode"] == "managed" and each["type"] in _GROUPS]
        names = [instance["attributes"].get("name") for each in groups for instance in each["instances"]]
        return group(self.cluster, HEAD) in names

    def place(self) -> Place | None:
        """Where the bucket of stack base is; None: Terraform knows of no bucket."""
        known = self._state("base")
        callers = [i["attributes"] for each in known if each["type"] == _CALLER for i in each["instances"]]
        account = next((caller["account_id"] for caller in callers if caller.get("account_id")), None)
        for resource in known:
            if resource["type"] in _BUCKETS and resource["instances"]:
                cloud, scheme, region, name = _BUCKETS[resource["type"]]
                found = resource["instances"][0]["attributes"]
                # Google writes regions in capitals.
                url = f"{scheme}://{found[name]}"
                return Place(cloud, found[region].lower(), url, found.get("project"), account)
        return None

    def document(self, stack: Stack) -> dict[str, Any]:
        """What Terraform reads of a stack."""
        found: dict[str, Any] = json.loads((self._folder(stack) / "cdk.tf.json").read_text())
        return found

    def _state(self, stack: Stack) -> list[dict[str, Any]]:
        """The resources that Terraform knows of. Raises `CloudError` if it cannot read that."""
        self._init(stack)
        code, said = self._run(stack, ["state", "pull"], quiet=True)
        if code:
            sys.stderr.write(said)
            raise CloudError(f"terraform state pull of stack {self.cluster}-{stack} failed, see above")
        # Terraform prints warnings after the document. Before the first apply, there is no document.
        state = json.JSONDecoder().raw_decode(said)[0] if said.startswith("{") else {}
        found: list[dict[str, Any]] = state.get("resources", [])
        return found

    def _terraform(self, stack: Stack, *words: str, good: tuple[int, ...] = (0,)) -> int:
        self._init(stack)
        self._refuse_unsaved(stack)
        code, said = self._run(stack, list(words))
        self._refuse_unsaved(stack)
        if code not in good and (lock := re.search(_LOCKED, said)):
            raise CloudError(
                f"another Terraform works on stack {self.cluster}-{stack}, or was killed and has left its lock (see"
                " above). Try again when it has ended. If none runs, remove the lock:"
                f" `terraform -chdir={self._folder(stack)} force-unlock {lock[1]}`"
            )
        if code not in good:
            raise CloudError(
                f"terraform {words[0]} of stack {self.cluster}-{stack} failed, see above; Terraform knows what it has"
                " done, and the next try goes on from there"
            )
        return code

    def _init(self, stack: Stack) -> None:
        if stack in self._ready:
            return
        code, said = self._run(stack, ["init", "-input=false", "-upgrade"], quiet=True)
        if code:
            console.warn(said)
            failed = f"terraform init of stack {self.cluster}-{stack} failed, see above"
            if not (self._folder(stack) / ".terraform.lock.hcl").exists():
                raise CloudError(failed)
            # Perhaps the registry does not answer. What an earlier init has installed is enough to take machines down;
            # if it is not what the stack asks for, Terraform's next command says so.
            console.warn(f"spotrun: {failed}; goes on with what is installed")
        self._ready.add(stack)

    def _refuse_unsaved(self, stack: Stack) -> None:
        """Raise `CloudError` if Terraform could not save its state."""
        left = self._folder(stack) / "errored.tfstate"
        if left.exists():
            raise CloudError(
                f"Terraform could not save its state of stack {self.cluster}-{stack}; it is in {left}: sign in,"
                f" then `terraform -chdir={left.parent} state push errored.tfstate`, and remove that file"
            )

    def _run(self, stack: Stack, words: list[str], quiet: bool = False) -> tuple[int, str]:
        """The exit status, and what Terraform said. It is also shown, unless `quiet`."""
        return programs.run(
            [terraform(), *words, *([] if sys.stderr.isatty() and not quiet else ["-no-color"])],
            self._folder(stack),
            {**os.environ, "TF_IN_AUTOMATION": "1"},
            "spotrun: Terraform stops and saves what it knows; press Ctrl-C again to kill it",
            quiet,
        )

    def _folder(self, stack: Stack) -> Path:
        return self.folder / "stacks" / f"{self.cluster}-{stack}"


def synthesize(cluster: ClusterSpec, file: str, home: Path) -> Stacks:
    """Write the stacks' JSON below `home`. Raises `SpotrunError` in the words of `python -m infra`."""
    check_tools()
    folder = home / "stacks" / cluster.name
    folder.mkdir(parents=True, exist_ok=True)
    where = {"CLUSTER": str(Path(file).absolute()), "CDKTF_OUTDIR": str(folder), "SPOTRUN_HOME": str(home)}
    command, environment = [sys.executable, "-m", "infra"], {**os.environ, **where}
    try:
        done = subprocess.run(
            command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=_SYNTH, check=False
        )
    except subprocess.TimeoutExpired:
        raise SpotrunError(f"{file}: synthesis did not end within {_SYNTH:g} s") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()
        word = said[-1].removeprefix("spotrun: ")
        named = word.startswith((file, where["CLUSTER"]))
        raise SpotrunError(word if named else f"{file}: cannot be synthesized: {word}")
    return Stacks(cluster.name, folder)


def terraform() -> str:
    """The program's path; the variable TERRAFORM names another, such as tofu. Raises `SpotrunError`."""
    name = os.environ.get("TERRAFORM") or "terraform"
    path = shutil.which(name)
    if path is None:
        raise SpotrunError(
            f"there is no `{name}` on this machine: install Terraform {_text(TERRAFORM)} or newer"
            " (developer.hashicorp.com/terraform/install), or name another: TERRAFORM=tofu"
        )
    return path


def check_tools() -> None:
    """Raise `SpotrunError` unless Terraform and Node.js are there, new enough."""
    path = terraform()
    found = _version([path, "version"])
    if found < TERRAFORM and "tofu" not in Path(path).name:
        raise SpotrunError(f"{path} is version {_text(found)}; spotrun needs Terraform {_text(TERRAFORM)} or newer")
    node = shutil.which("node")
    if node is None:
        raise SpotrunError(
            f"there is no `node` on this machine: install Node.js {_text(NODE)} or newer (nodejs.org); CDKTF runs on it"
        )
    found = _version([node, "--version"])
    if found < NODE:
        raise SpotrunError(f"{node} is version {_text(found)}; CDKTF needs Node.js {_text(NODE)} or newer (nodejs.org)")


def _version(command: list[str]) -> tuple[int, ...]:
    """(major, minor) in what a program prints of itself; (0,) if it prints none."""
    said = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False).stdout
    match = re.search(r"v([0-9]+)\.([0-9]+)", said)
    return (int(match[1]), int(match[2])) if match else (0,)


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
