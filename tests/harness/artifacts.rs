//! Where the things under test are, and what to say when they are missing.
//!
//! A missing thing fails the tests that need it, with the command that makes it. Who really wants
//! to go without names it in `CUBE_ALLOW_SKIP` (a list with commas), and is told so in red.

use std::env;
use std::path::{Path, PathBuf};

/// Something that tests need and do not make themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Artifact {
    /// `cube-vmm`, release build. `CUBE_VMM` names another.
    Vmm,
    /// The guest kernel. `CUBE_KERNEL` names another.
    Kernel,
    /// The root image with the agent. `CUBE_INITRD` names another.
    Initrd,
    /// `containerd-shim-cube-v2`, release build. `CUBE_SHIM` names another.
    Shim,
    /// The root image with `cube-oci`. `CUBE_CONTAINER_INITRD` names another.
    ContainerInitrd,
    /// `crictl`. `CUBE_CRICTL` names another.
    Crictl,
    /// A distribution's kernel, a bzImage with modules.
    StockKernel,
    /// The root image that loads the modules of [`Artifact::StockKernel`].
    StockInitrd,
}

impl Artifact {
    /// What `CUBE_ALLOW_SKIP` calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vmm => "cube-vmm",
            Self::Kernel => "kernel",
            Self::Initrd => "initrd",
            Self::Shim => "containerd-shim-cube-v2",
            Self::ContainerInitrd => "container-initrd",
            Self::Crictl => "crictl",
            Self::StockKernel | Self::StockInitrd => "stock-kernel",
        }
    }

    /// Where it is, or would be.
    pub fn path(self) -> PathBuf {
        let given = |name| env::var_os(name).map(PathBuf::from);
        match self {
            Self::Vmm => given("CUBE_VMM").unwrap_or_else(built_vmm),
            Self::Kernel => given("CUBE_KERNEL").unwrap_or_else(|| beside_vmm("vmlinux")),
            Self::Initrd => given("CUBE_INITRD").unwrap_or_else(|| beside_vmm("initrd.cpio")),
            Self::Shim => given("CUBE_SHIM")
                .unwrap_or_else(|| built_vmm().with_file_name("containerd-shim-cube-v2")),
            Self::ContainerInitrd => {
                given("CUBE_CONTAINER_INITRD").unwrap_or_else(|| beside_vmm("container.cpio"))
            }
            Self::Crictl => given("CUBE_CRICTL").unwrap_or_else(|| go_tool("crictl")),
            Self::StockKernel => cache().join("stock/vmlinuz"),
            Self::StockInitrd => cache().join("stock/initrd.cpio"),
        }
    }

    fn cure(self) -> &'static str {
        match self {
            Self::Vmm => "cargo build --release -p cube-vmm",
            Self::Kernel => "guest-kernel/build.sh",
            Self::Initrd => "rootfs/build.sh",
            Self::ContainerInitrd => "rootfs/build.sh --containers",
            Self::Shim => "cargo build --release -p containerd-shim-cube",
            Self::Crictl => "tests/harness/go-tool crictl",
            Self::StockKernel | Self::StockInitrd => "tests/harness/stock-kernel",
        }
    }

    /// Its path, or what to do to have it.
    pub fn find(self) -> Result<PathBuf, String> {
        let path = self.path();
        if path.is_file() {
            return Ok(path);
        }
        let (name, shown, cure) = (self.name(), path.display(), self.cure());
        Err(format!("{name} is missing: no {shown}; run {cure}"))
    }

    /// Its path as text, for a command line.
    ///
    /// # Panics
    /// If it is missing: the test fails and says what to run.
    pub fn arg(self) -> String {
        match self.find() {
            Ok(path) => text(&path),
            Err(message) => panic!("{message}"),
        }
    }
}

/// A path as text, which those of tests always are.
pub fn text(path: &Path) -> String {
    path.to_str().expect("paths of tests are text").to_owned()
}

/// The repository.
pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is in the repository")
}

/// `<target>/release/cube-vmm`; this runs as `<target>/<profile>/deps/<name>`.
fn built_vmm() -> PathBuf {
    let target = env::current_exe().ok().and_then(|exe| Some(exe.ancestors().nth(3)?.to_owned()));
    target.unwrap_or_else(|| repository().join("target")).join("release/cube-vmm")
}

/// Where `cube-vmm` itself looks when no file is named: `../guest` beside its folder.
fn beside_vmm(name: &str) -> PathBuf {
    let vmm = Artifact::Vmm.path();
    vmm.ancestors().nth(2).unwrap_or(&vmm).join("guest").join(name)
}

/// What `go-tool` has built last, by its link.
fn go_tool(name: &str) -> PathBuf {
    cache().join("go").join(name).join(name)
}

fn cache() -> PathBuf {
    let home = || Some(PathBuf::from(env::var_os("HOME")?).join(".cache"));
    let base = || env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home);
    let set = env::var_os("CUBE_CACHE").map(PathBuf::from);
    set.or_else(|| Some(base()?.join("cubevmm"))).unwrap_or_else(|| "cubevmm".into())
}

/// Whether `CUBE_ALLOW_SKIP` has this name.
pub fn may_skip(name: &str) -> bool {
    let allowed = env::var("CUBE_ALLOW_SKIP").unwrap_or_default();
    allowed.split(',').any(|word| word.trim() == name)
}

/// Says in red that something is left out.
pub fn tell_skipped(what: &str, reason: &str) {
    eprintln!("\x1b[1;31mSKIPPED\x1b[0m {what}: {reason}");
}
