//! What the server's jail is, as the kernel tells it.

use std::fs;
use std::path::PathBuf;

use tempfile::tempdir;

use super::{config, mounted, server_of};
use crate::guest::ROOT;

/// A file of the server's in /proc.
fn proc(pid: i32, name: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/{name}"))
}

fn status(pid: i32, name: &str) -> String {
    let text = fs::read_to_string(proc(pid, "status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap().trim().to_owned()
}

#[test]
fn x1_the_root_of_the_server_is_the_share_and_nothing_else_is_mounted() {
    let share = tempdir().unwrap();
    fs::write(share.path().join("f"), "x").unwrap();
    let _guest = mounted(config(share.path()));
    let pid = server_of(share.path()).unwrap();
    let names: Vec<_> = fs::read_dir(proc(pid, "root")).unwrap().collect();
    assert_eq!(names.len(), 1);
    assert!(proc(pid, "root/f").exists() && !proc(pid, "root/proc").exists());
    let mounts = fs::read_to_string(proc(pid, "mountinfo")).unwrap();
    assert_eq!(mounts.lines().count(), 1, "{mounts}");
    for option in ["nosuid", "nodev", "noexec"] {
        assert!(mounts.contains(option), "{mounts}");
    }
}

#[test]
fn x2_a_read_only_share_is_mounted_read_only() {
    let share = tempdir().unwrap();
    let read_only = devices::virtio::fs::FsConfig { read_only: true, ..config(share.path()) };
    let _guest = mounted(read_only);
    let mounts = fs::read_to_string(proc(server_of(share.path()).unwrap(), "mountinfo")).unwrap();
    let options = mounts.split(' ').nth(5).unwrap();
    assert!(options.split(',').any(|option| option == "ro"), "{mounts}");
}

#[test]
fn x3_the_server_has_namespaces_of_its_own() {
    let share = tempdir().unwrap();
    let _guest = mounted(config(share.path()));
    let pid = server_of(share.path()).unwrap();
    for kind in ["mnt", "net", "ipc", "uts", "pid"] {
        let theirs = fs::read_link(proc(pid, &format!("ns/{kind}"))).unwrap();
        let ours = fs::read_link(format!("/proc/self/ns/{kind}")).unwrap();
        assert_ne!(theirs, ours);
    }
    let network = fs::read_to_string(proc(pid, "net/dev")).unwrap();
    assert_eq!(network.lines().count(), 3, "{network}");
}

#[test]
fn x4_few_capabilities_are_left_and_none_can_be_gained() {
    let share = tempdir().unwrap();
    let _guest = mounted(config(share.path()));
    let pid = server_of(share.path()).unwrap();
    // CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETGID, SETUID, SETFCAP.
    let kept = format!("{:016x}", 0b1101_1011_u64 | 1 << 31);
    for set in ["CapPrm", "CapEff"] {
        assert_eq!(status(pid, set), kept, "{set}");
    }
    for set in ["CapInh", "CapBnd", "CapAmb"] {
        assert_eq!(status(pid, set), format!("{:016x}", 0), "{set}");
    }
    assert_eq!(status(pid, "NoNewPrivs"), "1");
}

#[test]
fn x5_system_calls_are_filtered() {
    let share = tempdir().unwrap();
    let _guest = mounted(config(share.path()));
    assert_eq!(status(server_of(share.path()).unwrap(), "Seccomp"), "2");
}

#[test]
fn x6_no_descriptor_of_the_vmm_is_inherited() {
    let share = tempdir().unwrap();
    let secret = tempfile::NamedTempFile::new().unwrap();
    // Without close-on-exec, as somebody careless leaves it.
    // SAFETY: a descriptor that is open.
    let careless = unsafe { libc::dup(std::os::fd::AsRawFd::as_raw_fd(secret.as_file())) };
    assert!(careless > 2);
    let mut guest = mounted(config(share.path()));
    guest.mkdir(ROOT, "d").unwrap();
    let pid = server_of(share.path()).unwrap();
    let open =
        fs::read_dir(proc(pid, "fd")).unwrap().filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
    let open: Vec<_> = open.map(|path| path.display().to_string()).collect();
    let secret = secret.path().display().to_string();
    assert!(!open.iter().any(|path| path.contains(&secret)), "{open:?}");
    // SAFETY: closes what was opened above.
    unsafe { libc::close(careless) };
}
