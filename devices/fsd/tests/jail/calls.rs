//! System calls that a file server does not make.

use std::io;

/// One that it does make.
pub const HARMLESS: &str = "getpid";

/// Names, numbers and first arguments. With all others zero, none does harm where nothing refuses it.
pub const REFUSED: &[(&str, i64, [i64; 3])] = &[
    ("socket", libc::SYS_socket, [0, 0, 0]),
    ("connect", libc::SYS_connect, [-1, 0, 0]),
    ("bind", libc::SYS_bind, [-1, 0, 0]),
    ("accept4", libc::SYS_accept4, [-1, 0, 0]),
    ("kill", libc::SYS_kill, [1, 0, 0]),
    ("pidfd_open", libc::SYS_pidfd_open, [1, 0, 0]),
    ("ptrace", libc::SYS_ptrace, [0, 0, 0]),
    ("process_vm_readv", libc::SYS_process_vm_readv, [1, 0, 0]),
    ("clone", libc::SYS_clone, [-1, 0, 0]),
    ("clone3", libc::SYS_clone3, [0, 0, 0]),
    ("execve", libc::SYS_execve, [0, 0, 0]),
    ("execveat", libc::SYS_execveat, [-1, 0, 0]),
    ("mount", libc::SYS_mount, [0, 0, 0]),
    ("umount2", libc::SYS_umount2, [0, 0, 0]),
    ("open_tree", libc::SYS_open_tree, [-1, 0, 0]),
    ("move_mount", libc::SYS_move_mount, [-1, 0, 0]),
    ("mount_setattr", libc::SYS_mount_setattr, [-1, 0, 0]),
    ("fsopen", libc::SYS_fsopen, [0, 0, 0]),
    ("pivot_root", libc::SYS_pivot_root, [0, 0, 0]),
    ("chroot", libc::SYS_chroot, [0, 0, 0]),
    ("unshare", libc::SYS_unshare, [0, 0, 0]),
    ("setns", libc::SYS_setns, [-1, 0, 0]),
    ("name_to_handle_at", libc::SYS_name_to_handle_at, [-1, 0, 0]),
    ("open_by_handle_at", libc::SYS_open_by_handle_at, [-1, 0, 0]),
    ("ioctl", libc::SYS_ioctl, [-1, 0, 0]),
    ("bpf", libc::SYS_bpf, [-1, 0, 0]),
    ("perf_event_open", libc::SYS_perf_event_open, [0, 0, 0]),
    ("io_uring_setup", libc::SYS_io_uring_setup, [0, 0, 0]),
    ("userfaultfd", libc::SYS_userfaultfd, [-1, 0, 0]),
    ("memfd_create", libc::SYS_memfd_create, [0, 0, 0]),
    ("add_key", libc::SYS_add_key, [0, 0, 0]),
    ("keyctl", libc::SYS_keyctl, [-1, 0, 0]),
    ("shmget", libc::SYS_shmget, [0, 0, 0]),
    ("msgget", libc::SYS_msgget, [-1, 0, 0]),
    ("mq_open", libc::SYS_mq_open, [0, 0, 0]),
    ("init_module", libc::SYS_init_module, [0, 0, 0]),
    ("finit_module", libc::SYS_finit_module, [-1, 0, 0]),
    ("kexec_load", libc::SYS_kexec_load, [0, -1, 0]),
    ("reboot", libc::SYS_reboot, [0, 0, 0]),
    ("swapon", libc::SYS_swapon, [0, 0, 0]),
    ("sethostname", libc::SYS_sethostname, [0, -1, 0]),
    ("settimeofday", libc::SYS_settimeofday, [0, 0, 0]),
    ("iopl", libc::SYS_iopl, [-1, 0, 0]),
    ("prlimit64", libc::SYS_prlimit64, [-1, 0, 0]),
    ("seccomp", libc::SYS_seccomp, [-1, 0, 0]),
    ("prctl, to be dumped", libc::SYS_prctl, [libc::PR_SET_DUMPABLE as i64, 1, 0]),
    ("fcntl, for signals", libc::SYS_fcntl, [-1, libc::F_SETOWN as i64, 0]),
    ("mmap of a program", libc::SYS_mmap, [0, 0, libc::PROT_EXEC as i64]),
    ("mprotect to a program", libc::SYS_mprotect, [0, 0, libc::PROT_EXEC as i64]),
];

/// Makes a call, and tells that it was not the end.
pub fn make(name: &str) -> String {
    let known = REFUSED.iter().find(|call| call.0 == name);
    let (number, [a, b, c]) = known.map_or((libc::SYS_getpid, [0; 3]), |call| (call.1, call.2));
    // SAFETY: no argument is an address, and no such call changes memory.
    let result = unsafe { libc::syscall(number, a, b, c, 0, 0, 0) };
    format!("it has come back with {result} ({})", io::Error::last_os_error())
}
