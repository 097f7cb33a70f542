//! The system calls of a file server. Any other ends the process.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

/// Why there is no filter.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    /// It cannot be made.
    #[error("the filter of system calls cannot be made: {0}")]
    Make(#[from] BackendError),
    /// The kernel refuses it.
    #[error("the filter of system calls cannot be installed: {0}")]
    Install(#[from] seccompiler::Error),
}

/// Files, by descriptor and below directories.
const FILES: &[i64] = &[
    libc::SYS_close,
    libc::SYS_copy_file_range,
    libc::SYS_dup,
    libc::SYS_fallocate,
    libc::SYS_fchdir,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_fdatasync,
    libc::SYS_fgetxattr,
    libc::SYS_flistxattr,
    libc::SYS_fremovexattr,
    libc::SYS_fsetxattr,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_getdents64,
    libc::SYS_getxattr,
    libc::SYS_linkat,
    libc::SYS_listxattr,
    libc::SYS_lseek,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_read,
    libc::SYS_readlinkat,
    libc::SYS_readv,
    libc::SYS_removexattr,
    libc::SYS_renameat2,
    libc::SYS_setxattr,
    libc::SYS_statx,
    libc::SYS_symlinkat,
    libc::SYS_syncfs,
    libc::SYS_umask,
    libc::SYS_unlinkat,
    libc::SYS_utimensat,
    libc::SYS_write,
    libc::SYS_writev,
];

/// Whose rights a file is made with; FSETID given up for a write.
const CREDENTIALS: &[i64] = &[
    libc::SYS_capget,
    libc::SYS_capset,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_setgroups,
    libc::SYS_setresgid,
    libc::SYS_setresuid,
];

/// The process itself, its memory and its sockets.
const PROCESS: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_wait,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_madvise,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_poll,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
];

/// Memory may be mapped and protected, but not as program.
const WITHOUT_EXECUTION: &[i64] = &[libc::SYS_mmap, libc::SYS_mprotect];

fn rules() -> Result<BTreeMap<i64, Vec<SeccompRule>>, BackendError> {
    let any = FILES.iter().chain(CREDENTIALS).chain(PROCESS);
    let mut rules: BTreeMap<_, _> = any.map(|&call| (call, Vec::new())).collect();
    for &call in WITHOUT_EXECUTION {
        let exec = SeccompCmpOp::MaskedEq(libc::PROT_EXEC as u64);
        let plain = SeccompCondition::new(2, SeccompCmpArgLen::Dword, exec, 0)?;
        rules.insert(call, vec![SeccompRule::new(vec![plain])?]);
    }
    // Descriptors can be duplicated and marked, not given signals or leases. capng asks prctl about
    // the bounding set, and no more.
    let limited = [
        (libc::SYS_fcntl, 1, libc::F_DUPFD_CLOEXEC as u64),
        (libc::SYS_fcntl, 1, libc::F_GETFD as u64),
        (libc::SYS_fcntl, 1, libc::F_GETFL as u64),
        (libc::SYS_prctl, 0, libc::PR_CAPBSET_READ as u64),
        (libc::SYS_prctl, 0, libc::PR_GET_SECUREBITS as u64),
        (libc::SYS_prctl, 0, libc::PR_CAP_AMBIENT as u64),
    ];
    for (call, argument, value) in limited {
        let (len, equal) = (SeccompCmpArgLen::Dword, SeccompCmpOp::Eq);
        let condition = SeccompCondition::new(argument, len, equal, value)?;
        rules.entry(call).or_default().push(SeccompRule::new(vec![condition])?);
    }
    Ok(rules)
}

/// From here on only these.
pub fn install() -> Result<(), FilterError> {
    let (kill, allow) = (SeccompAction::KillProcess, SeccompAction::Allow);
    let filter = SeccompFilter::new(rules()?, kill, allow, TargetArch::x86_64)?;
    let program: BpfProgram = filter.try_into()?;
    Ok(seccompiler::apply_filter(&program)?)
}
