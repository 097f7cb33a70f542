//! The daemon: serves one sandbox until it is over.

use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use containerd_shim::Flags;
use containerd_shim_protos::ttrpc::asynchronous::Server;
use containerd_shim_protos::ttrpc::asynchronous::transport::Listener;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::{SigHandler, Signal, signal};

use crate::bootstrap::check_name;
use crate::config::Config;
use crate::delete::end_processes;
use crate::error::{Error, Result, io};
use crate::events::Events;
use crate::place::Place;
use crate::sandbox::Sandbox;
use crate::start::LISTENER;
use crate::{logs, oom, task};

/// How long containerd may take to take the last events.
const LAST_EVENTS: Duration = Duration::from_secs(5);
/// How long the last answer may take to be on its way.
const LAST_ANSWER: Duration = Duration::from_millis(20);

/// Serves, with the bundle of the sandbox's first container as the working directory.
pub fn serve(flags: &Flags) -> Result<()> {
    check_name("namespace", &flags.namespace)?;
    check_name("id", &flags.id)?;
    // A reader of the log or of output that goes away is no reason to end.
    // SAFETY: no handler of ours is installed, the signal is only ignored.
    unsafe { signal(Signal::SIGPIPE, SigHandler::SigIgn) }.map_err(io("ignore SIGPIPE"))?;
    logs::install(Path::new("log"), flags.debug);
    oom::volunteer(std::process::id());
    let listener = listener()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(io("start the shim's threads"))?;
    runtime.block_on(run(flags, listener))
}

/// The listener that `start` has made.
fn listener() -> Result<UnixListener> {
    // SAFETY: `start` has put the listener there; nothing else in this process has the number, and
    // what is not a socket is found out next.
    let listener = UnixListener::from(unsafe { OwnedFd::from_raw_fd(LISTENER) });
    // A child that kept it would let containerd connect to a shim that is dead.
    fcntl(&listener, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))
        .map_err(std::io::Error::from)
        .and_then(|_| listener.local_addr())
        .and_then(|_| listener.set_nonblocking(true))
        .map_err(|error| {
            Error::Invalid(format!(
                "descriptor {LISTENER} is no listening socket ({error}): this program is started \
                 by containerd, as `start`; see --help"
            ))
        })?;
    Ok(listener)
}

async fn run(flags: &Flags, listener: UnixListener) -> Result<()> {
    let address = listener.local_addr().map_err(io("find the shim's socket"))?;
    let socket = address.as_pathname().unwrap_or(Path::new("")).to_owned();
    let place = Place::of(&socket);
    // A predecessor that was killed may have left some.
    end_processes(&place);
    place.clear()?;
    place.make()?;
    let events =
        Events::start(&std::env::var("TTRPC_ADDRESS").unwrap_or_default(), &flags.namespace);
    let config = Config::load()?;
    let sandbox = Sandbox::new(&flags.namespace, &flags.id, place, config, events.clone());
    sandbox.write_down(None)?;
    let bundle = std::env::current_dir().map_err(io("find the bundle"))?;
    sandbox.watch_wanted(bundle);
    let listener = Listener::try_from(listener).map_err(io("serve on the socket"))?;
    let services = task::services(&sandbox);
    let mut server = Server::new().add_listener(listener).register_service(services);
    let started = server.start().await;
    started.map_err(|error| Error::Unavailable(format!("the Task service: {error}")))?;
    sandbox.over().await;
    events.flush(LAST_EVENTS).await;
    tokio::time::sleep(LAST_ANSWER).await;
    let _ = std::fs::remove_file(&socket);
    Ok(())
}
