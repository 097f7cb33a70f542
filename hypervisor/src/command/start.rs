//! `cube-vmm start`: a VM in the foreground, with a control socket.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use nix::sys::signal::Signal;

use super::options::VmOptions;
use super::run::{check_writable, write_trace};
use crate::agent::watch_for_hello;
use crate::api_socket::ApiSocket;
use crate::builder::{self, Observers};
use crate::console::ConsoleSink;
use crate::control::{Control, Happening};
use crate::event::Events;
use crate::outcome::EXIT_NOT_READY;
use crate::signals;
use crate::trace::{Ladder, step};

/// Options of `start`.
#[derive(Args, Clone, Debug)]
pub struct StartOptions {
    /// Unix socket on which the VM takes requests
    #[arg(long, value_name = "PATH")]
    pub api_socket: PathBuf,

    /// Unix socket for vsock: CONNECT <port> reaches the guest, <PATH>_<port> is where its own
    /// connections go [default: the api socket's path with .vsock added]
    #[arg(long, value_name = "PATH")]
    pub vsock: Option<PathBuf>,

    /// The VM.
    #[command(flatten)]
    pub vm: VmOptions,
}

/// How long a guest may take to power off after a signal.
const SIGNAL_GRACE: Duration = Duration::from_secs(5);

/// The vsock socket of a VM, unless somebody says where.
pub(super) fn beside(api_socket: &Path) -> PathBuf {
    let mut path = api_socket.as_os_str().to_owned();
    path.push(".vsock");
    path.into()
}

/// Runs it until the guest ends. The exit code tells how.
pub fn start(options: &StartOptions, ladder: Ladder) -> anyhow::Result<u8> {
    let mut config = options.vm.config(true)?;
    let vsock = options.vsock.clone().unwrap_or_else(|| beside(&options.api_socket));
    config.vsock = Some(vsock);
    if let Some(path) = &options.vm.trace {
        check_writable(path)?;
    }
    let socket = ApiSocket::bind(&options.api_socket)?;
    let (events, receiver) = Events::channel();
    let stamp_entry = options.vm.trace.is_some();
    let console = ConsoleSink::default();
    let observers = Observers { ladder, stamp_entry, events: events.clone(), console };
    let vm = builder::build(&config, &observers)?;
    signals::watch(events.clone())?;
    let mut control = Control::new(vm, events, receiver);
    watch_for_hello(control.vm().vsock(), observers.events.clone())?;
    control.start()?;
    socket.serve(observers.events.clone())?;
    let patience = Some(options.vm.boot_timeout());
    let code = until_the_end(&mut control, patience, &observers.ladder, || true);
    if let Some(path) = &options.vm.trace {
        write_trace(path, &observers.ladder)?;
    }
    Ok(code)
}

/// Serves the VM until its end, which an agent that has not said hello within `patience` is. `ready`
/// is called when it has, and says whether that still matters to anybody.
pub(super) fn until_the_end(
    control: &mut Control,
    patience: Option<Duration>,
    ladder: &Ladder,
    mut ready: impl FnMut() -> bool,
) -> u8 {
    let mut deadline = patience.map(|patience| Instant::now() + patience);
    let mut signalled = false;
    loop {
        match control.next(deadline) {
            Happening::Ready => {
                ladder.mark(step::AGENT_READY);
                tracing::info!("the guest is ready");
                deadline = None;
                if !ready() {
                    control.kill();
                    return 0;
                }
            }
            Happening::NotReady(reason) if deadline.is_some() => {
                control.kill();
                report(control, &format!("the restored guest is not ready: {reason}"));
                return EXIT_NOT_READY;
            }
            Happening::NotReady(reason) => {
                tracing::error!(reason, "the restored guest is not ready");
            }
            Happening::Ended(outcome) => {
                if !outcome.is_orderly() {
                    report(control, &outcome.to_string());
                }
                return outcome.exit_code();
            }
            Happening::Signal(signal) if signal == Signal::SIGWINCH as i32 => {}
            Happening::Signal(_) if signalled || deadline.is_some() => {
                control.kill();
                return 0;
            }
            Happening::Signal(_) => {
                signalled = true;
                control.power_off(SIGNAL_GRACE);
            }
            Happening::TimedOut => {
                let stands = control.vm().positions();
                control.kill();
                let seconds = patience.unwrap_or_default().as_secs();
                let late = "the guest's agent did not answer within";
                report(control, &format!("{late} {seconds} s; {stands}"));
                return EXIT_NOT_READY;
            }
            Happening::Finished => {}
        }
    }
}

fn report(control: &Control, message: &str) {
    eprintln!("cube-vmm: {message}; its console ended with:");
    for line in control.vm().console().tail(20) {
        eprintln!("  | {line}");
    }
}
