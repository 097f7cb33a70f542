# Two targets do all there is: `make demo` shows a guest, `make test` proves the project.
# Both install what they need on Debian and Ubuntu and take seconds when nothing has changed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

TARGET := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target)
VMM := $(TARGET)/release/cube-vmm
step = @printf '\n\033[1m== %s\033[0m\n' '$(1)' >&2

# Where `make install` puts things; DESTDIR is put before it, for packagers.
PREFIX := /usr/local

.PHONY: help demo test build packages kernel rootfs lint unit native guest bench install clean

help: ## Show this text
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: build ## Install, build, boot a guest, run a command in it, print the boot ladder
	$(call step,A command in a guest)
	@tests/demo $(VMM)

test: build lint unit native guest ## Install, build, and run every check and test

build: packages ## Build the VMM, the shim, the guest kernel and the root images
	$(call step,VMM and shim)
	@cargo build --release -p cube-vmm -p cube-fsd -p containerd-shim-cube
	$(call step,Guest kernel (the first time takes about ten minutes))
	@guest-kernel/build.sh
	$(call step,Root images)
	@rootfs/build.sh
	@rootfs/build.sh --containers

packages: ## Install the packages that the other targets need (asks sudo if need be)
	@tests/packages

kernel: packages ## Build the guest kernel only
	@guest-kernel/build.sh

rootfs: packages ## Build the root images only
	@rootfs/build.sh
	@rootfs/build.sh --containers

lint: ## Check format and lints
	$(call step,Format and lints)
	@cargo fmt --all --check
	@cargo clippy --workspace --all-targets --all-features -- -D warnings

unit: ## Run the tests that need no KVM
	$(call step,Unit tests)
	@cargo test --workspace --exclude cube-tests
	@cargo test -p cube-tests --lib --test faults

native: ## Run the tests of tiny guests, on any /dev/kvm
	$(call step,Tiny guests)
	@if [ -e /dev/kvm ]; then cargo test -p cube-tests --test kvm --test hostile --test snapshot --test saving --test restore; \
	else echo 'no /dev/kvm here: in the lab' >&2; \
	     cargo test -p cube-tests --test kvm --test hostile --test snapshot --test saving --test restore --no-run; \
	     tests/lab/run -- cargo test --offline -p cube-tests --test kvm --test hostile --test snapshot --test saving --test restore; fi

guest: ## Run the tests of Linux guests, on hardware KVM or in the lab
	$(call step,Linux guests)
	@tests/harness/stock-kernel >/dev/null
	@tests/harness/go-tool crictl >/dev/null
	@tests/guests $(VMM)

bench: build ## Measure the boot (see benches/README.md for more)
	$(call step,Benches)
	@cargo build --release -p cube-benches
	$(call step,Floor)
	@$(TARGET)/release/floor

install: ## Install what `make build` has built, for containerd (as root; PREFIX, DESTDIR)
	@install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/share/cube $(DESTDIR)/etc/cube
	@install -m 755 $(VMM) $(TARGET)/release/cube-fsd $(TARGET)/release/containerd-shim-cube-v2 \
		$(DESTDIR)$(PREFIX)/bin
	@ln -sf containerd-shim-cube-v2 $(DESTDIR)$(PREFIX)/bin/containerd-shim-cube-rs
	@install -m 644 $(TARGET)/guest/vmlinux $(TARGET)/guest/initrd.cpio $(TARGET)/guest/container.cpio \
		shim/install/containerd-cube.toml shim/install/runtimeclass.yaml $(DESTDIR)$(PREFIX)/share/cube
	@[ -e $(DESTDIR)/etc/cube/config.toml ] || sed 's|/usr/local|$(PREFIX)|' shim/install/config.toml \
		>$(DESTDIR)/etc/cube/config.toml
	@echo 'installed; try: ctr run --rm --runtime io.containerd.cube.v2 IMAGE NAME uname -r' >&2

clean: ## Remove what was built here; the caches of kernel and lab stay
	@cargo clean
