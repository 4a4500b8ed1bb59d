# `make` prints the targets. The first target that needs the virtual environment makes it. A changed pyproject.toml or
# constraints.txt updates it.

CLUSTER ?= clusters/local.yaml
JOB     ?= examples/digits/job.yaml
VENV    ?= .venv
FAB     := $(VENV)/bin/python -m scripts.fab
CHECKOV := $(VENV)-checkov
# Run several tests at a time. If possible, the tests of a file run one after the other: they share costly fixtures.
# The report has each test's outcome and seconds: it tells what is slow, and what fails now and then.
PARALLEL = -n auto --dist worksteal --junitxml=build/$@.xml
# Variables from the user of a target, taken as typed. Make expands a variable from its command line at each use, also
# for `export`: '$HOME' becomes OME, and '$(shell …)' runs here. A copy by `:=` of `$(value X)` is not expanded.
GIVEN   := CLUSTER JOB NODE RANK CMD TIMEOUT FAULTS NOTICE ID GROUP MONTH MEASURE RATE OUT TO PORT TRACES POLARITY JSON FORCE ALL STRICT RAW TAIL RUNS SEED PUBLIC PRUNE DRY WHERE SORT A B TAG TEXT GREP SINCE GEN FOLLOW STEPS
override defined = $(foreach name,$(1),$(if $(filter-out undefined,$(origin $(name))),$(name)))
# Make exports all variables of its command line (such as TERRAFORM=tofu). ARGS is for developers: a shell expands it.
TYPED   := $(foreach name,$(filter-out ARGS,$(.VARIABLES)),$(if $(filter command,$(origin $(name))),$(name)))
# The tasks read these, and refuse a variable of the command line that no target takes, such as a misspelt one.
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
# A cluster in a cloud needs more packages: the cloud's SDK, and CDKTF for its stacks.
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
.PHONY: help plan up train jobs status cost advise follow dashboard logs stacks profile runs show diff rerun tag note rm export tensorboard ssh run preempt kill relaunch stop pause resume priority budget simulate down acceptance image images image-versions image-trial test test-fast test-clouds test-gpu test-image lint bench-recovery bench-overhead bench-footprint bench-synth bench-startup bench-snapshots bench-transfer bench-jobs bench-scale bench-capacity bench-metrics bench-dashboard bench-gpu soak clean

# No task checks what was typed for these targets. So check it first, if there is anything to check.
ifneq ($(strip $(SPOTRUN_TYPED) $(word 2,$(MAKECMDGOALS))),)
image images image-trial: typed-ready
image-versions test test-fast test-clouds test-gpu test-image lint bench-recovery bench-overhead bench-footprint bench-synth bench-startup bench-snapshots bench-transfer bench-jobs bench-scale bench-capacity bench-metrics bench-dashboard bench-gpu soak: typed-dev
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

jobs: $(READY) ## all jobs, by group: priority, phase, nodes, step, end, cost, and why a job waits
	@$(FAB) jobs $(cluster)

status: $(READY) ## what the cluster does now [ID=job]
	@$(FAB) status $(cluster) $(job_id)

cost: $(READY) ## what jobs have cost so far and will cost to the end, by pool and market, with savings [ID=job, or GROUP=group; MONTH=2026-11]
	@$(FAB) cost $(cluster) $(job_id) $(call flag,MONTH,month) $(call flag,GROUP,group)

advise: $(READY) ## which machines suit a job, by cost and time to finish [JOB= MEASURE=2m: measure each pool first; RATE=samples/s OUT=folder: a table and a plot]
	@$(FAB) advise $(cluster) --job " $$JOB" $(call flag,MEASURE,measure) $(call flag,RATE,rate) $(call flag,OUT,out)

follow: $(READY) ## follow the running job, or all jobs of a group; Ctrl-C stops following, and they run on [ID=job, or GROUP=group]
	@$(FAB) follow $(cluster) $(job_id) $(call flag,GROUP,group)

dashboard: $(READY) ## a page in your browser: cluster, jobs, runs, logs; also while the cluster is down. Ctrl-C ends it [PORT=: default any free one]
	@$(FAB) dashboard $(cluster) $(call flag,PORT,port)

logs: $(READY) ## what the workers printed [NODE= RANK=number or all, ID=job TAIL=lines GREP=pattern SINCE=10m GEN=number or all, FOLLOW=1: live; RAW=1: with escape sequences]
	@$(FAB) logs $(cluster) $(job_id) $(call flag,NODE,node) $(call flag,RANK,rank) $(call flag,TAIL,tail) $(call flag,GREP,grep) $(call flag,SINCE,since) $(call flag,GEN,gen) $(call yes,FOLLOW,follow) $(call yes,RAW,raw)

stacks: $(READY) ## where each worker of a job is in its code now: Python stacks, equal ones together; training goes on [ID=job NODE=]
	@$(FAB) stacks $(cluster) $(job_id) $(call flag,NODE,node)

profile: $(READY) ## record some steps of a running job with torch's profiler; says what took the time, and training goes on [ID=job STEPS=5 RANK=number: default 0, or NODE=: all its ranks]
	@$(FAB) profile $(cluster) $(job_id) $(call flag,STEPS,steps) $(call flag,RANK,rank) $(call flag,NODE,node)

runs: $(READY) ## all runs, also while the cluster is down [WHERE='phase=succeeded loss<0.5 tag=best' SORT=-cost]
	@$(FAB) runs $(cluster) $(call flag,WHERE,where) $(call flag,SORT,sort)

show: $(READY) ## one run: where it came from, generations, machines, cost, results: ID=
	@$(FAB) show $(cluster) $(job_id)

diff: $(READY) ## what differs between two runs: code, job file, packages, machines, results: A= B=
	@$(FAB) diff $(cluster) $(call flag,A,first) $(call flag,B,second)

rerun: $(READY) ## submit a run's job again with the same code; says what may differ: ID=
	@$(FAB) rerun $(cluster) $(job_id)

tag: $(READY) ## add tags to a run, or remove one with a minus: ID= TAG=best, TAG=-best
	@$(FAB) tag $(cluster) $(job_id) $(call flag,TAG,tag)

note: $(READY) ## add a note to a run: ID= TEXT='lr too high'
	@$(FAB) note $(cluster) $(job_id) $(call flag,TEXT,text)

rm: $(READY) ## remove all that the bucket has of a run that has ended: ID=; asks first [FORCE=1: without a question]
	@$(FAB) rm $(cluster) $(job_id) $(call yes,FORCE,force)

export: $(READY) ## write a run's metrics for other programs: ID= TO=csv, parquet, tensorboard or mlflow [OUT=folder, or MLflow's tracking URI]
	@$(FAB) export $(cluster) $(job_id) $(call flag,TO,to) $(call flag,OUT,out)

tensorboard: $(READY) ## open TensorBoard on runs, while they train too; Ctrl-C ends it [ID=run,run or GROUP=: default all that have not ended, PORT=: default any free one]
	@$(FAB) tensorboard $(cluster) $(job_id) $(call flag,GROUP,group) $(call flag,PORT,port)

ssh: $(READY) ## a shell on a node, or on the head [NODE=: default head]
	@$(FAB) ssh $(cluster) $(call flag,NODE,node)

run: $(READY) ## run a command on all nodes, or on one: CMD='df -h' [NODE= TIMEOUT=90s]
	@$(FAB) run $(cluster) --cmd " $$CMD" $(call flag,NODE,node) $(call flag,TIMEOUT,timeout)

preempt: $(READY) ## have the cloud take a node away, with notice, as a test: NODE= [NOTICE=30s]
	@$(FAB) preempt $(cluster) --node " $$NODE" $(call flag,NOTICE,notice)

kill: $(READY) ## have the cloud take a node away without notice, as a test: NODE=
	@$(FAB) kill $(cluster) --node " $$NODE"

relaunch: $(READY) ## continue a failed, stopped or held job from its checkpoint, or restart the workers of a running job [ID=job]
	@$(FAB) relaunch $(cluster) $(job_id)

stop: $(READY) ## stop the job, or all jobs of a group; their state goes into the bucket. Also lets go of a node that a failed job keeps [ID=job, or GROUP=group]
	@$(FAB) stop $(cluster) $(job_id) $(call flag,GROUP,group)

pause: $(READY) ## give the job's machines to others until `make resume`; its state goes into the bucket [ID=job]
	@$(FAB) pause $(cluster) $(job_id)

resume: $(READY) ## let a paused job have machines again [ID=job]
	@$(FAB) resume $(cluster) $(job_id)

priority: $(READY) ## change the job's priority: TO= (-1000 to 1000; jobs of higher priority get machines first) [ID=job]
	@$(FAB) priority $(cluster) $(job_id) $(call flag,TO,to)

budget: $(READY) ## change what the job may cost in all: TO= (dollars). If it has ended: before `make relaunch` [ID=job]
	@$(FAB) budget $(cluster) $(job_id) $(call flag,TO,to)

simulate: $(READY) ## what a job would cost, and when it would end, on recorded spot markets; starts nothing [JOB= TRACES=folder POLARITY=available or preempted, RUNS= SEED=]
	@$(FAB) simulate $(cluster) --job " $$JOB" $(call flag,TRACES,traces) $(call flag,POLARITY,polarity) $(call flag,RUNS,runs) $(call flag,SEED,seed)

down: $(READY) ## take the cluster down; refused while a job runs [FORCE=1: even then; ALL=1: also a cloud's network and bucket, unless the bucket holds results]
	@$(FAB) down $(cluster) $(call yes,FORCE,force) $(call yes,ALL,all)

acceptance: $(READY) ## the first day: try everything on real machines, cheapest first, then take it down [DRY=1: only list; ALL=1: also what has passed]
	@$(FAB) acceptance $(cluster) $(call yes,ALL,all) $(call yes,DRY,dry)

test: $(VENV)/.installed-dev ## run the tests, several at a time [ARGS='-k planner -x', ARGS='-n0 tests/head': one at a time]
	@$(VENV)/bin/python -m pytest $(PARALLEL) $(ARGS)

test-fast: $(VENV)/.installed-dev ## run the tests without the slow files, which are listed in SLOW of tests/conftest.py; one to three minutes on two cores [ARGS=]
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
	@$(VENV)/bin/python -m pytest tests/image --junitxml=build/$@.xml $(ARGS)

lint: $(VENV)/.installed-dev $(CHECKOV)/.installed ## check style, types, images, and what the stacks would make [STRICT=1: no tool may be missing]
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/python -m scripts.commits
	@$(VENV)/bin/python -m images.lint $(call yes,STRICT,strict)
	@rm -rf build/stacks
	@$(VENV)/bin/python -m infra.lint build/stacks clusters/*.yaml
	@$(CHECKOV)/bin/checkov --config-file .checkov.yaml -d build/stacks

bench-recovery: $(VENV)/.installed-dev ## measure recovery against torchrun and torchft; writes bench/RESULTS.md
	@$(VENV)/bin/python -m bench.recovery $(ARGS)

bench-overhead: $(VENV)/.installed-dev ## measure what a step costs under spotrun, beside bare DDP; writes bench/RESULTS.md
	@$(VENV)/bin/python -m bench.overhead $(ARGS)

bench-footprint: $(VENV)/.installed-dev ## measure how much memory and CPU the head and the agents take; writes bench/RESULTS.md
	@$(VENV)/bin/python -m bench.footprint $(ARGS)

bench-synth: $(VENV)/.installed-dev ## measure the time and memory to write a cluster's stacks; writes bench/RESULTS.md
	@$(VENV)/bin/python -m bench.synth $(ARGS)

bench-startup: $(VENV)/.installed-dev ## measure how long an agent takes to join; writes bench/RESULTS.md
	@$(VENV)/bin/python -m bench.startup $(ARGS)

bench-snapshots: $(VENV)/.installed-dev ## measure how long snapshots delay training; writes bench/RESULTS.md
	@$(VENV)/bin/python -m bench.snapshots $(ARGS)

bench-transfer: $(VENV)/.installed-dev ## measure how long a newcomer waits for the state; writes bench/RESULTS.md
	@$(VENV)/bin/python -m bench.transfer $(ARGS)

bench-jobs: $(VENV)/.installed-dev ## measure how long an urgent job waits for a machine of a full cluster; writes bench/RESULTS.md
	@$(VENV)/bin/python -m bench.jobs $(ARGS)

bench-scale: $(VENV)/.installed-dev ## measure the head with up to 1,000 agents and 100 jobs; writes bench/RESULTS.md
	@$(VENV)/bin/python -m bench.scale $(ARGS)

bench-metrics: $(VENV)/.installed-dev ## measure what run.log costs a training loop; writes bench/RESULTS.md
	@$(VENV)/bin/python -m bench.metrics $(ARGS)

bench-dashboard: $(VENV)/.installed-dev ## measure the dashboard with many runs and millions of points; writes bench/RESULTS.md
	@$(VENV)/bin/python -m bench.dashboard $(ARGS)

bench-capacity: $(VENV)/.installed-dev ## compare policies of capacity on recorded spot markets; writes bench/RESULTS.md
	@$(VENV)/bin/python -m bench.capacity $(ARGS)

bench-gpu: $(VENV)/.installed-dev ## on a machine with a GPU, measure what only a GPU shows; writes bench/RESULTS.md
	@$(VENV)/bin/python -m bench.gpu $(ARGS)

soak: $(VENV)/.installed-dev ## start clusters on this machine, and small jobs with random faults on them [RUNS=10 SEED=1 ARGS='--out bench/RESULTS.md']
	@$(VENV)/bin/python -m bench.soak $(call flag,RUNS,runs) $(call flag,SEED,seed) $(ARGS)

clean: ## remove the set-up and all caches; the local clusters' state (.spotrun) stays
	rm -rf $(VENV) $(CHECKOV) cdktf.out build dist agent/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find agent bench examples scripts tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(call install,train$(comma)local$(comma)operator$(comma)examples)

$(VENV)/.installed-gcp $(VENV)/.installed-aws: $(VENV)/.installed-%: pyproject.toml constraints.txt
	@$(call install,train$(comma)local$(comma)operator$(comma)examples$(comma)infra$(comma)$*)
	@touch $(VENV)/.installed

$(VENV)/.installed-dev: pyproject.toml constraints.txt
	@$(call install,train$(comma)local$(comma)operator$(comma)examples$(comma)infra$(comma)gcp$(comma)aws$(comma)dev)
	@touch $(VENV)/.installed $(VENV)/.installed-gcp $(VENV)/.installed-aws

# In another virtual environment: checkov pins old versions of packages that the clouds' packages need.
$(CHECKOV)/.installed: .ci/checkov.txt
	@echo "Installing checkov into $(CHECKOV); this happens once" >&2
	@$(VENV)/bin/python -m venv $(CHECKOV)
	@$(CHECKOV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r .ci/checkov.txt
	@touch $@

comma := ,
# Make the virtual environment, unless it is there and has pip, which comes last: an earlier make may have been
# interrupted. Then install the project with these extras, and touch the target. All output goes to stderr: stdout is for
# the target's own answer. pip does not compile, because it would compile one module after the other, most of them of
# Terraform's providers, of which few are ever loaded.
# Two makes at the same time would break each other's installation. So one waits, and then looks at its target. The lock
# is that of file 9. It belongs to this shell, and ends with it. flock is not on all systems, and Python is.
define install
mkdir -p $(VENV); exec 9>>$(VENV)/.lock; lock='import fcntl, sys; fcntl.flock(9, fcntl.LOCK_EX | int(sys.argv[1]))'; \
if command -v python3 >/dev/null && ! python3 -c "$$lock" 4 2>/dev/null; then \
	echo "Waiting for another make, which installs into $(VENV)" >&2; \
	python3 -c "$$lock" 0; \
	[ $@ -nt pyproject.toml ] && [ $@ -nt constraints.txt ] && exit 0; \
fi; \
if ! $(VENV)/bin/python -m pip --version >/dev/null 2>&1; then \
	for python in $(PYTHON) python3.11 python3.12 python3.13 python3.14 python3 python; do \
		$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && break; python=; \
	done; \
	if [ -z "$$python" ]; then \
		echo "spotrun needs Python 3.11 or newer, and found none. Install it, or name it: make PYTHON=/path/to/python3.11" >&2; \
		exit 2; \
	fi; \
	echo "Creating $(VENV) with $$($$python --version)" >&2; \
	$$python -m venv $(VENV) >&2 || { echo "Could not create $(VENV); on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }; \
fi; \
echo "Installing what is needed into $(VENV); this happens once" >&2; \
$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[$(1)]' >&2 && \
{ $(VENV)/bin/python -m compileall -qq -j 0 -x cdktf_cdktf_provider_ $(VENV)/lib >&2 || true; } && \
touch $@
endef
