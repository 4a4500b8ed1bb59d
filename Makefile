# The front door: `make` prints the targets. Set-up happens by itself, once, and again when pyproject.toml or
# constraints.txt change.

CLUSTER ?= clusters/local.yaml
JOB     ?= examples/digits/job.yaml
VENV    ?= .venv
FAB     := $(VENV)/bin/python -m scripts.fab
CHECKOV := $(VENV)-checkov
# Several tests at a time, one after the other of a file where that is possible: they share costly fixtures.
PARALLEL := -n auto --dist worksteal
# Variables from the user of a target, taken as typed. Make expands a variable from its command line at each use, also
# for `export`: '$HOME' becomes OME, and '$(shell …)' runs here. A copy by `:=` of `$(value X)` is not expanded.
GIVEN   := CLUSTER JOB NODE RANK CMD TIMEOUT FAULTS NOTICE ID JSON FORCE ALL STRICT RAW TAIL RUNS SEED PUBLIC PRUNE DRY
override defined = $(foreach name,$(1),$(if $(filter-out undefined,$(origin $(name))),$(name)))
# Make exports all variables of its command line (such as TERRAFORM=tofu). ARGS is for developers: a shell expands it.
TYPED   := $(foreach name,$(filter-out ARGS,$(.VARIABLES)),$(if $(filter command,$(origin $(name))),$(name)))
# For the tasks: they refuse a variable of the command line that no target takes, and one that is nearly right.
SPOTRUN_TYPED   := $(TYPED)
SPOTRUN_TARGETS := $(MAKECMDGOALS)
export SPOTRUN_TYPED SPOTRUN_TARGETS
TYPED   += $(filter-out $(TYPED),$(call defined,$(GIVEN)))
$(foreach name,$(TYPED),$(eval override $(name) := $$(value $(name))))
export $(TYPED)
# These three would pass the variables on to any make that a target starts.
unexport MAKEFLAGS MFLAGS MAKEOVERRIDES
# Quote a value as one word for a shell. Before GNU Make 4.4, $(shell) does not see exported variables.
override quoted = '$(subst ','\'',$(1))'
# A cluster in a cloud takes more packages: the cloud's own, and what its stacks are written with.
CLOUD   := $(firstword $(filter gcp aws,$(shell sed -nE 's/^cloud: *[^a-z]?([a-z]+).*/\1/p' -- $(call quoted,$(CLUSTER)) 2>/dev/null)))
READY   := $(VENV)/.installed$(if $(CLOUD),-$(CLOUD))

# Without the space, Invoke would take a value such as --json for an option. The tasks remove the space.
# Override: a lower-case variable of the command line, such as cluster=…, must not replace one of these.
override flag     = $(if $($(1)),--$(2) " $$$(1)")
override yes      = $(if $(filter-out $(NO),$($(1))),$(if $(filter-out $(YES),$($(1))),$(call unclear,$(1)),--$(2)))
override unclear  = $(error $(1): '$($(1))': allowed: 1 or 0)
override cluster  = --cluster " $$CLUSTER" $(call yes,JSON,json)
override job_id   = $(call flag,ID,id)
override NO      := 0 n no false off N No NO False FALSE Off OFF
override YES     := 1 y yes true on Y Yes YES True TRUE On ON

.DEFAULT_GOAL := help
.PHONY: help plan up train status follow logs ssh run preempt kill relaunch stop down acceptance image images image-versions image-trial test test-fast test-clouds test-gpu test-image lint bench-recovery bench-footprint bench-synth bench-startup soak clean

# For these targets, no task checks what was typed: done first, and only where there is anything to check.
ifneq ($(strip $(SPOTRUN_TYPED) $(word 2,$(MAKECMDGOALS))),)
image images image-trial: typed-ready
image-versions test test-fast test-clouds test-gpu test-image lint bench-recovery bench-footprint bench-synth bench-startup soak: typed-dev
.PHONY: typed-ready typed-dev
typed-ready: $(READY)
typed-dev: $(VENV)/.installed-dev
typed-ready typed-dev:
	@$(VENV)/bin/python -m scripts.inputs
endif

help: ## print this
	@echo "spotrun: torchrun for machines that vanish. Targets:"
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'
	@printf 'Variables: CLUSTER=%s JOB=%s JSON=1 (for programs)\n' "$$CLUSTER" "$$JOB"

plan: $(READY) ## what `make up` would change, as Terraform sees it (needs a cloud's CLUSTER=)
	@$(FAB) plan $(cluster)

up: $(READY) ## bring the cluster up: a head and a bucket; nodes come with a job
	@$(FAB) up $(cluster)

train: $(READY) ## run a job and follow it; brings the cluster up first [JOB= FAULTS=preempt@25%,kill@60% or none]
	@$(FAB) train $(cluster) --job " $$JOB" $(call flag,FAULTS,faults)

status: $(READY) ## what the cluster does now [ID=job]
	@$(FAB) status $(cluster) $(job_id)

follow: $(READY) ## follow the running job; Ctrl-C ends only the following [ID=job]
	@$(FAB) follow $(cluster) $(job_id)

logs: $(READY) ## what the workers printed [NODE= RANK= ID=job TAIL=lines RAW=1: with escape sequences]
	@$(FAB) logs $(cluster) $(job_id) $(call flag,NODE,node) $(call flag,RANK,rank) $(call flag,TAIL,tail) $(call yes,RAW,raw)

ssh: $(READY) ## a shell on a node, or on the head [NODE=: default head]
	@$(FAB) ssh $(cluster) $(call flag,NODE,node)

run: $(READY) ## run a command on all nodes, or on one: CMD='df -h' [NODE= TIMEOUT=seconds]
	@$(FAB) run $(cluster) --cmd " $$CMD" $(call flag,NODE,node) $(call flag,TIMEOUT,timeout)

preempt: $(READY) ## have the cloud take a node away, with notice, as a test: NODE= [NOTICE=seconds]
	@$(FAB) preempt $(cluster) --node " $$NODE" $(call flag,NOTICE,notice)

kill: $(READY) ## have the cloud take a node away without a word, as a test: NODE=
	@$(FAB) kill $(cluster) --node " $$NODE"

relaunch: $(READY) ## continue an ended or held job from its checkpoint, or restart the workers of a running job [ID=job]
	@$(FAB) relaunch $(cluster) $(job_id)

stop: $(READY) ## stop the job; its state goes into the bucket [ID=job]
	@$(FAB) stop $(cluster) $(job_id)

down: $(READY) ## take the cluster down; refused while a job runs [FORCE=1: even then; ALL=1: also a cloud's network and bucket; refused while it holds checkpoints]
	@$(FAB) down $(cluster) $(call yes,FORCE,force) $(call yes,ALL,all)

acceptance: $(READY) ## the first day: try everything on real machines, cheapest first, then take it down [DRY=1: only list; ALL=1: also what has passed]
	@$(FAB) acceptance $(cluster) $(call yes,ALL,all) $(call yes,DRY,dry)

test: $(VENV)/.installed-dev ## run the tests, several at a time [ARGS='-k planner -x', ARGS='-n0 tests/head': one at a time]
	@$(VENV)/bin/python -m pytest $(PARALLEL) $(ARGS)

test-fast: $(VENV)/.installed-dev ## run the tests without the slow files, which are listed in SLOW of tests/conftest.py; under a minute [ARGS=]
	@$(VENV)/bin/python -m pytest $(PARALLEL) --fast $(ARGS)

test-clouds: $(VENV)/.installed-dev ## run the tests about clouds: stacks, real Terraform, clusters on simulated AWS and Google
	@$(VENV)/bin/python -m pytest $(PARALLEL) -m clouds $(ARGS)

test-gpu: $(VENV)/.installed-dev ## run the tests that need CUDA; fails on a machine without a GPU
	@$(VENV)/bin/python -m pytest --gpu $(ARGS)

image: $(READY) ## bake the image for a cluster's cloud, with Packer [PUBLIC=1: on AWS without NAT; PRUNE=n: then DELETE all but the newest n and those in use]
	@$(VENV)/bin/python -m images.build "$$CLUSTER" $(call yes,PUBLIC,public) $(call flag,PRUNE,prune) $(ARGS)

images: $(READY) ## the images of a cluster's cloud, with age and price [PRUNE=n: DELETE all but the newest n and those in use]
	@$(VENV)/bin/python -m images.kept "$$CLUSTER" $(call yes,JSON,json) $(call flag,PRUNE,prune)

image-versions: $(VENV)/.installed-dev ## what images are pinned to, and what is newest in the registries in reach
	@$(VENV)/bin/python -m images.versions $(ARGS)

image-trial: $(READY) ## install what a bake would install, in a local Debian container, without cost; needs docker or podman
	@$(VENV)/bin/python -m images.trial "$$CLUSTER"

test-image: $(VENV)/.installed-dev ## bake both images into folders and start what is in them; needs root and debootstrap
	@$(VENV)/bin/python -m pytest tests/image $(ARGS)

lint: $(VENV)/.installed-dev $(CHECKOV)/.installed ## check style, types, images, and what the stacks would make [STRICT=1: no tool may be missing]
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/python -m scripts.commits
	@$(VENV)/bin/python -m images.lint $(call yes,STRICT,strict)
	@rm -rf build/stacks
	@$(VENV)/bin/python -m infra.lint build/stacks clusters/*.yaml
	@$(CHECKOV)/bin/checkov --config-file .checkov.yaml -d build/stacks

bench-recovery: $(VENV)/.installed-dev ## measure recovery against torchrun; writes bench/RESULTS.md
	@$(VENV)/bin/python -m bench.recovery $(ARGS)

bench-footprint: $(VENV)/.installed-dev ## measure how much memory and CPU the head and the agents take; writes bench/RESULTS.md
	@$(VENV)/bin/python -m bench.footprint $(ARGS)

bench-synth: $(VENV)/.installed-dev ## measure the time and memory to write a cluster's stacks; writes bench/RESULTS.md
	@$(VENV)/bin/python -m bench.synth $(ARGS)

bench-startup: $(VENV)/.installed-dev ## measure how long an agent takes to join; writes bench/RESULTS.md
	@$(VENV)/bin/python -m bench.startup $(ARGS)

soak: $(VENV)/.installed-dev ## start clusters on this machine, and small jobs with random faults on them [RUNS=10 SEED=1 ARGS='--out bench/RESULTS.md']
	@$(VENV)/bin/python -m bench.soak $(call flag,RUNS,runs) $(call flag,SEED,seed) $(ARGS)

clean: ## remove the set-up and all caches; the local clusters' state (.spotrun) stays
	rm -rf $(VENV) $(CHECKOV) cdktf.out build dist agent/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find agent bench examples scripts tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(call install,train$(comma)local$(comma)operator$(comma)examples)
	@touch $@

$(VENV)/.installed-gcp $(VENV)/.installed-aws: $(VENV)/.installed-%: pyproject.toml constraints.txt
	@$(call install,train$(comma)local$(comma)operator$(comma)examples$(comma)infra$(comma)$*)
	@touch $(VENV)/.installed $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt
	@$(call install,train$(comma)local$(comma)operator$(comma)examples$(comma)infra$(comma)gcp$(comma)aws$(comma)dev)
	@touch $(VENV)/.installed $(VENV)/.installed-gcp $(VENV)/.installed-aws $@

# Apart from the rest: it pins old versions of what the clouds' modules need.
$(CHECKOV)/.installed: .ci/checkov.txt
	@echo "Installing checkov into $(CHECKOV); this happens once" >&2
	@$(VENV)/bin/python -m venv $(CHECKOV)
	@$(CHECKOV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r .ci/checkov.txt
	@touch $@

comma := ,
# Make the virtual environment unless it is there, and install the project with these extras. All it says goes to
# stderr: stdout is for what the target itself answers. pip would compile one module after the other, and spend most of
# its time on those of Terraform's providers, of which few are ever loaded.
define install
if [ ! -x $(VENV)/bin/python ]; then \
	for python in $(PYTHON) python3.11 python3.12 python3.13 python3.14 python3 python; do \
		$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && break; python=; \
	done; \
	if [ -z "$$python" ]; then \
		echo "spotrun needs Python 3.11 or newer, and found none. Install it, or name it: make PYTHON=/path/to/python3.11" >&2; \
		exit 2; \
	fi; \
	echo "Creating $(VENV) with $$($$python --version)" >&2; \
	$$python -m venv $(VENV) >&2 || { rm -rf $(VENV); echo "Could not create $(VENV); on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }; \
fi; \
echo "Installing what is needed into $(VENV); this happens once" >&2; \
$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[$(1)]' >&2 && \
{ $(VENV)/bin/python -m compileall -qq -j 0 -x cdktf_cdktf_provider_ $(VENV)/lib >&2 || true; }
endef
