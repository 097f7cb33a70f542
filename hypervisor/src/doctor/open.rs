//! Opening `/dev/kvm`: every way in which that fails has a name, the datum, and a cure.
//!
//! Called by whoever is about to create a guest, and by the doctor. It proves only that the
//! device answers; whether a guest *runs* is what [`examine`](super::examine) finds out.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use kvm_bindings::KVM_API_VERSION;
use kvm_ioctls::Kvm;

/// The KVM device.
pub const KVM_DEVICE: &str = "/dev/kvm";

/// Why `/dev/kvm` cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KvmProblem {
    /// There is no such device: no KVM module is loaded, or the container does not see it.
    #[error(
        "{path} does not exist: load kvm_intel or kvm_amd (modprobe), enable virtualization in \
         the firmware or on the outer hypervisor, or pass the device into this container"
    )]
    Missing {
        /// The path that was tried.
        path: String,
    },
    /// The device is there, but not for this user.
    #[error(
        "{path} (mode {mode:04o}, group {group}) may not be opened by uid {uid}: \
         join that group, or run setfacl -m u:{uid}:rw {path} as root"
    )]
    NoPermission {
        /// The path that was tried.
        path: String,
        /// The user that tried.
        uid: u32,
        /// Permission bits of the device.
        mode: u32,
        /// Owning group of the device.
        group: u32,
    },
    /// The device answered with another API version.
    #[error(
        "{path} speaks KVM API version {found}, not {KVM_API_VERSION}: \
         run a host kernel of version 2.6.22 or later"
    )]
    WrongApiVersion {
        /// The path that was tried.
        path: String,
        /// The version it reported.
        found: i32,
    },
    /// Opening or asking failed in another way.
    #[error(
        "{path} cannot be used as a KVM device: see the kernel log (dmesg) for lines of kvm, and \
         whether another hypervisor holds the processor's virtualization"
    )]
    Unusable {
        /// The path that was tried.
        path: String,
        /// What the kernel answered.
        #[source]
        source: io::Error,
    },
}

impl KvmProblem {
    /// One line with the cause at the end, for reports that do not print error chains.
    pub fn one_line(&self) -> String {
        match self {
            Self::Unusable { source, .. } => format!("{self}: {source}"),
            _ => self.to_string(),
        }
    }

    fn from_open(path: &Path, source: io::Error) -> Self {
        let shown = path.display().to_string();
        match source.kind() {
            io::ErrorKind::NotFound => Self::Missing { path: shown },
            io::ErrorKind::PermissionDenied => {
                let (mode, group) = fs::metadata(path)
                    .map(|metadata| (metadata.mode() & 0o7777, metadata.gid()))
                    .unwrap_or_default();
                // SAFETY: geteuid has no preconditions and cannot fail.
                let uid = unsafe { libc::geteuid() };
                Self::NoPermission { path: shown, uid, mode, group }
            }
            _ => Self::Unusable { path: shown, source },
        }
    }
}

/// Checks that `/dev/kvm` exists, may be opened and speaks the API version that we speak.
///
/// Takes microseconds, and runs no guest.
pub fn quick_kvm_check() -> Result<(), KvmProblem> {
    open_kvm(Path::new(KVM_DEVICE)).map(drop)
}

pub(super) fn open_kvm(path: &Path) -> Result<Kvm, KvmProblem> {
    let c_path = CString::new(path.as_os_str().as_bytes())
        .map_err(|error| KvmProblem::from_open(path, error.into()))?;
    let kvm =
        Kvm::new_with_path(&c_path).map_err(|error| KvmProblem::from_open(path, error.into()))?;
    let found = kvm.get_api_version();
    if found == KVM_API_VERSION as i32 {
        return Ok(kvm);
    }
    // The ioctl of something that is no KVM device fails instead of answering.
    let path_text = path.display().to_string();
    Err(match found {
        ..0 => KvmProblem::Unusable { path: path_text, source: io::Error::last_os_error() },
        _ => KvmProblem::WrongApiVersion { path: path_text, found },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_device_is_named() {
        let problem = open_kvm(Path::new("/nowhere/kvm")).unwrap_err();
        assert!(matches!(problem, KvmProblem::Missing { .. }), "{problem:?}");
        assert!(problem.to_string().starts_with("/nowhere/kvm does not exist: load kvm_intel"));
    }

    #[test]
    fn another_device_is_no_kvm() {
        let problem = open_kvm(Path::new("/dev/null")).unwrap_err();
        assert!(matches!(problem, KvmProblem::Unusable { .. }), "{problem:?}");
        assert!(problem.one_line().contains("(os error 25)"), "{}", problem.one_line());
    }

    #[test]
    fn a_path_with_a_nul_is_refused() {
        let problem = open_kvm(Path::new("/dev/\0kvm")).unwrap_err();
        assert!(matches!(problem, KvmProblem::Unusable { .. }), "{problem:?}");
    }

    #[test]
    fn a_forbidden_device_tells_its_mode_and_the_cure() {
        let denied = io::Error::from_raw_os_error(libc::EACCES);
        let problem = KvmProblem::from_open(Path::new("/dev/null"), denied);
        let text = problem.to_string();
        assert!(matches!(problem, KvmProblem::NoPermission { mode: 0o666, .. }), "{problem:?}");
        assert!(text.contains("mode 0666, group 0") && text.contains("setfacl"), "{text}");
    }
}
