//! PID 1: makes the guest a place to run commands in, forks the agent proper, and from then on
//! only reaps.
//!
//! The fork keeps two uses of `wait` apart: PID 1 reaps whatever orphan is handed to it, and the
//! agent waits for the very processes it has started, so neither can take the other's.

mod cmdline;
mod modules;
mod mounts;
mod reaper;
mod root;

use crate::listen::{Agent, listen_vsock};
use crate::log::Log;
use crate::{power, ready, stamp};
use cmdline::Cmdline;
use guest_protocol::{PowerOff, boot_stamp};
use nix::errno::Errno;
use nix::sys::resource::{Resource, setrlimit};
use nix::unistd::{ForkResult, fork, sethostname};
use std::convert::Infallible;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};
use std::{fs, io, panic, thread};

const LOG: Log = Log::Kernel;

/// As many files as a process may have open: the default limit of the kernel's own.
const MAX_FILES: u64 = 1 << 20;

/// How long the kernel may take to find its vsock device.
const VSOCK_PATIENCE: Duration = Duration::from_secs(10);

/// Why the guest cannot boot.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot mount {fstype} on '{target}': {}", .errno.desc())]
    Mount { fstype: String, target: String, errno: Errno },
    #[error("{0}")]
    Root(#[from] root::Error),
    #[error("cannot {action}: {}", .errno.desc())]
    System { action: &'static str, errno: Errno },
    #[error("cannot start the agent: {0}")]
    Agent(io::Error),
    #[error("no vsock after {} s: {}", VSOCK_PATIENCE.as_secs(), .0.desc())]
    Vsock(Errno),
}

/// Boots the guest and keeps it, for ever.
pub fn run() -> ! {
    panic::set_hook(Box::new(|panic| LOG.error(panic)));
    let Err(error) = boot();
    LOG.error(format_args!("cannot boot: {error}; powering off"));
    power::off(PowerOff::Poweroff)
}

fn boot() -> Result<Infallible, Error> {
    mounts::early()?;
    modules::load(LOG);
    let cmdline = Cmdline::read();
    let root = root::enter(&cmdline)?;
    mounts::late(LOG)?;
    name_host(&cmdline);
    if let Err(errno) = raise_loopback() {
        LOG.error(format_args!("cannot raise the loopback interface: {errno}"));
    }
    // Not worth a word: the limits that are there will do.
    let _ = setrlimit(Resource::RLIMIT_NOFILE, MAX_FILES, MAX_FILES);
    let signals = reaper::Signals::block();
    // SAFETY: there is only this one thread.
    match unsafe { fork() }.map_err(|errno| Error::System { action: "fork", errno })? {
        ForkResult::Child => {
            signals.restore();
            let Err(error) = agent(root);
            LOG.error(error);
            std::process::exit(1)
        }
        ForkResult::Parent { child } => {
            mounts::delegate_cgroups();
            signals.reap(child, LOG)
        }
    }
}

/// The agent proper.
fn agent(root: String) -> Result<Infallible, Error> {
    // Not the name of PID 1, for whoever looks at the processes.
    let _ = fs::write("/proc/self/comm", "cube-agent");
    // The last to go when memory runs out; its children set themselves back.
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    // One heap for all threads, and buffers that are given back: memory is the guest's, not ours.
    // SAFETY: sets numbers.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 16 << 10);
    }
    let agent = Agent::new(root, true, LOG).map_err(Error::Agent)?;
    let listener = wait_for_vsock()?;
    stamp::stamp(boot_stamp::AGENT_READY);
    let announcing = agent.clone();
    thread::Builder::new()
        .name("ready".into())
        .stack_size(64 << 10)
        .spawn(move || ready::announce(&announcing.hello, LOG))
        .map_err(Error::Agent)?;
    agent.serve_vsock(&listener)
}

/// Listens; a transport in a module may take a moment to come.
fn wait_for_vsock() -> Result<OwnedFd, Error> {
    let start = Instant::now();
    loop {
        match listen_vsock() {
            Ok(listener) => return Ok(listener),
            Err(errno) if start.elapsed() > VSOCK_PATIENCE => return Err(Error::Vsock(errno)),
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    }
}

fn name_host(cmdline: &Cmdline) {
    let file = fs::read_to_string("/etc/hostname").unwrap_or_default();
    let from_file = file.lines().map(str::trim).find(|line| !line.is_empty());
    let name = cmdline.get("cube.hostname").or(from_file).unwrap_or("cube");
    if let Err(errno) = sethostname(name) {
        LOG.error(format_args!("cannot set the host name '{name}': {errno}"));
    }
}

fn raise_loopback() -> Result<(), Errno> {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

    let flags = SockFlag::SOCK_CLOEXEC;
    let socket = socket(AddressFamily::Inet, SockType::Datagram, flags, None)?;
    // SAFETY: a zeroed structure is a valid one.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (target, source) in request.ifr_name.iter_mut().zip(b"lo") {
        *target = source.to_ne_bytes()[0].cast_signed();
    }
    let up = i16::try_from(libc::IFF_UP | libc::IFF_RUNNING).map_err(|_| Errno::EINVAL)?;
    request.ifr_ifru.ifru_flags = up;
    // SAFETY: the structure is valid, and the kernel only reads it.
    let set =
        unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const request) };
    Errno::result(set).map(drop)
}
