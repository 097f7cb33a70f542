//! The VMM of a sandbox: a process of its own, watched, and asked over its control socket.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use hypervisor::api::{Reply, Request};
use nix::unistd::dup;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::cgroup::Group;
use crate::config::Config;
use crate::error::{Error, Result, io};
use crate::network::{Card, Network};
use crate::oom;
use crate::place::Place;
use crate::record::{self, Identity};
use crate::sizing::Size;

/// The name of the share's device.
const SHARE: &str = "cube";
/// Its socket to the guest, in the sandbox's folder.
const VSOCK: &str = "vsock.sock";
/// How long the VMM may take to answer a request that needs no guest.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often a guest that boots is asked whether it is ready.
const LOOK: Duration = Duration::from_millis(5);
/// How many lines of its log are told when it has failed.
const LAST_LINES: usize = 12;

/// A VMM that was started.
#[derive(Debug)]
pub struct Vmm {
    /// Its process.
    pub identity: Identity,
    api: PathBuf,
    log: PathBuf,
    ended: watch::Receiver<Option<String>>,
}

impl Vmm {
    /// Starts one that boots a guest.
    pub fn start(config: &Config, place: &Place, size: Size, network: &Network) -> Result<Self> {
        let cards = cards(network)?;
        let mut command = Command::new(&config.vmm);
        command
            .args(["start", "--vsock"])
            .arg(place.file(VSOCK))
            .arg("--kernel")
            .arg(&config.kernel)
            .arg("--initrd")
            .arg(&config.initrd)
            .args(["--cpus", &size.cpus.to_string()])
            .args(["--memory", &format!("{}M", size.memory_mib)])
            .args(["--boot-timeout", &config.boot_timeout_s.to_string()])
            .args(["--fs", &format!("tag=cube,id={SHARE},path={}", place.share().display())])
            .args(cards.0.iter().flat_map(Inherited::new_card))
            .args(&config.vmm_options);
        Self::spawn(command, config, place, network)
    }

    /// Starts one that goes on with the state in `snapshot`, with the same network and share.
    pub fn restore(
        config: &Config,
        place: &Place,
        snapshot: &Path,
        network: &Network,
    ) -> Result<Self> {
        let cards = cards(network)?;
        let share = place.share();
        let mut command = Command::new(&config.vmm);
        command
            .arg("restore")
            .arg(snapshot)
            // What it was made from, the host's own shim has said.
            .args(["--resume", "--trust-paths", "--override"])
            .arg(format!("vsock={}", place.file(VSOCK).display()))
            .arg("--override")
            .arg(format!("fs:{SHARE}=path={},policy=tolerant", share.display()))
            .args(cards.0.iter().flat_map(Inherited::known_card));
        Self::spawn(command, config, place, network)
    }

    /// Starts one that goes on with a checkpoint, as another machine with other things.
    pub fn copy(
        config: &Config,
        place: &Place,
        snapshot: &Path,
        network: &Network,
        hostname: &str,
    ) -> Result<Self> {
        let cards = cards(network)?;
        let mut command = Command::new(&config.vmm);
        command
            .arg("restore")
            .arg(snapshot)
            .args(["--resume", "--hostname", hostname, "--override"])
            .arg(format!("vsock={}", place.file(VSOCK).display()))
            .arg("--override")
            .arg(format!("fs:{SHARE}=path={},policy=copy", place.share().display()))
            .args(cards.0.iter().flat_map(Inherited::known_card));
        Self::spawn(command, config, place, network)
    }

    fn spawn(
        mut command: Command,
        config: &Config,
        place: &Place,
        network: &Network,
    ) -> Result<Self> {
        let (api, log) = (place.file("api.sock"), place.file("vmm.log"));
        let output = File::options().create(true).append(true).open(&log);
        let output = output.map_err(io(format!("open {}", log.display())))?;
        let errors = output.try_clone().map_err(io("share the VMM's log"))?;
        command.arg("--api-socket").arg(&api).stdin(Stdio::null()).stdout(output).stderr(errors);
        let namespace = network.own.as_ref().map(|own| own.namespace.as_raw_fd());
        let seat = seat(place);
        let (group, file) = seat.map_or((None, None), |(group, file)| (Some(group), Some(file)));
        // SAFETY: the child calls nothing but write, with a constant, and prctl, unshare and setns,
        // which take numbers.
        unsafe { command.pre_exec(move || grouped(file.as_ref()).and_then(|()| alone(namespace))) };
        let child = command.spawn().map_err(|error| {
            let vmm = config.vmm.display();
            Error::Unavailable(format!(
                "the VMM {vmm} cannot be started: {error}; set vmm in {}",
                crate::config::PATH
            ))
        })?;
        let pid = child.id().unwrap_or_default();
        let identity = Identity::of(pid)
            .ok_or_else(|| Error::Unavailable(failure(&log, "the VMM has ended at once")))?;
        oom::volunteer(pid);
        if let Some(Err(error)) = group.as_ref().map(|group| group.take_in(pid)) {
            tracing::warn!(%error, "the VM is not in its control group");
        }
        let (sender, ended) = watch::channel(None);
        tokio::spawn(watch_end(child, group, sender));
        Ok(Self { identity, api, log, ended })
    }

    /// Waits until the guest's agent has said hello.
    pub async fn ready(&self, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        let mut ended = self.ended.clone();
        loop {
            if let Some(how) = ended.borrow_and_update().clone() {
                return Err(Error::Unavailable(failure(&self.log, &how)));
            }
            if let Ok(Reply::Info(info)) = self.ask(&Request::Info {}).await
                && info.ready
            {
                return Ok(());
            }
            if Instant::now() > deadline {
                let what = format!("the guest was not ready within {} s", patience.as_secs());
                return Err(Error::Unavailable(failure(&self.log, &what)));
            }
            sleep(LOOK).await;
        }
    }

    /// Asks for something, and takes a refusal for an error.
    pub async fn ask(&self, request: &Request) -> Result<Reply> {
        let asked = timeout(PATIENCE, exchange(&self.api, request)).await;
        let reply = asked.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()));
        match reply {
            Ok(Reply::Error { message, .. }) => Err(Error::State(message)),
            Ok(reply) => Ok(reply),
            Err(error) => Err(Error::Unavailable(format!("the VMM does not answer: {error}"))),
        }
    }

    /// Asks for something that takes as long as it takes, unless the VMM ends.
    pub async fn ask_long(&self, request: &Request) -> Result<Reply> {
        let mut ended = self.ended.clone();
        tokio::select! {
            reply = exchange(&self.api, request) => match reply {
                Ok(Reply::Error { message, .. }) => Err(Error::State(message)),
                Ok(reply) => Ok(reply),
                Err(error) => {
                    Err(Error::Unavailable(format!("the VMM does not answer: {error}")))
                }
            },
            _ = ended.wait_for(Option::is_some) => {
                let how = self.ended.borrow().clone().unwrap_or_default();
                Err(Error::Unavailable(failure(&self.log, &how)))
            }
        }
    }

    /// How it has ended, once it has.
    pub fn ended(&self) -> watch::Receiver<Option<String>> {
        self.ended.clone()
    }

    /// Its last words, for the log.
    pub fn last_words(&self) -> String {
        tail(&self.log)
    }

    /// Ends it by force, and waits for that.
    pub async fn kill(&self) {
        kill(&self.identity);
        let mut ended = self.ended.clone();
        let _ = timeout(PATIENCE, ended.wait_for(Option::is_some)).await;
    }
}

/// Kills a process, if it is still the one that was meant.
pub fn kill(identity: &Identity) {
    if identity.lives() {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(identity.pid).unwrap_or_default());
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
    }
}

/// Makes the control group that is written down for a sandbox. Without one it has to do.
fn seat(place: &Place) -> Option<(Group, File)> {
    let group = record::read::<record::Sandbox>(&place.file(record::SANDBOX))?.group?;
    match group.make() {
        Ok(file) => Some((group, file)),
        Err(error) => {
            let folder = group.folder.display();
            tracing::warn!(%error, %folder, "the VM has no control group of its own");
            None
        }
    }
}

/// Goes into a control group before there is anything that could be left out of it.
fn grouped(procs: Option<&File>) -> std::io::Result<()> {
    let Some(mut procs) = procs else { return Ok(()) };
    // Whether that works the shim finds out, and tells.
    let _ = std::io::Write::write(&mut procs, b"0");
    Ok(())
}

/// Ends it when nobody is left who could, and takes it away from the host's network and shared
/// memory, of which it needs nothing: what a plugin does to "the container's network" by its number
/// must not be done to the host's. `own` is a network namespace that waits for it.
fn alone(own: Option<RawFd>) -> std::io::Result<()> {
    // SAFETY: takes numbers and changes nothing but this process's own setting.
    let tied = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    // SAFETY: takes a number; the process has one thread here.
    let alone = unsafe { libc::unshare(libc::CLONE_NEWIPC) };
    let network = match own {
        // SAFETY: takes numbers; the shim has the descriptor open, and this process its copy.
        Some(own) => unsafe { libc::setns(own, libc::CLONE_NEWNET) },
        // SAFETY: as above.
        None => unsafe { libc::unshare(libc::CLONE_NEWNET) },
    };
    if [tied, alone, network] == [0; 3] { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// A copy of a TAP that the VMM inherits. It is closed here when it has it.
struct Inherited {
    fd: OwnedFd,
    /// The card's name.
    id: String,
    /// What the guest's card is like.
    like: String,
}

impl Inherited {
    fn new_card(&self) -> [String; 2] {
        let Self { fd, id, like } = self;
        ["--net".to_owned(), format!("fd={},id={id},{like}", fd.as_raw_fd())]
    }

    fn known_card(&self) -> [String; 2] {
        ["--override".to_owned(), format!("net:{}=fd:{}", self.id, self.fd.as_raw_fd())]
    }
}

/// Those of a network.
struct Cards(Vec<Inherited>);

fn cards(network: &Network) -> Result<Cards> {
    let inherited = |card: &Card| {
        // No flag to close it: the VMM shall inherit this copy.
        let fd = dup(&card.tap).map_err(io("hand a TAP to the VMM"))?;
        // Of what is not there yet, nobody knows the MTU.
        let mtu = if network.waits() { String::new() } else { format!(",mtu={}", card.mtu) };
        let like = format!("mac={}{mtu}", card.mac);
        Ok(Inherited { fd, id: card.name.clone(), like })
    };
    network.cards.iter().map(inherited).collect::<Result<_>>().map(Cards)
}

/// Waits for its end, ends its file servers, and tells it.
async fn watch_end(mut child: Child, group: Option<Group>, sender: watch::Sender<Option<String>>) {
    let how = match child.wait().await {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => format!("the VMM has ended with exit code {code}"),
            (None, signal) => format!("the VMM was killed by signal {}", signal.unwrap_or(0)),
        },
        Err(error) => format!("the VMM is lost: {error}"),
    };
    if let Some(group) = group {
        group.ended().await;
    }
    sender.send_replace(Some(how));
}

async fn exchange(api: &Path, request: &Request) -> std::io::Result<Reply> {
    let mut stream = BufReader::new(UnixStream::connect(api).await?);
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line).await?;
    let mut answer = String::new();
    stream.read_line(&mut answer).await?;
    Ok(serde_json::from_str(&answer)?)
}

fn failure(log: &Path, what: &str) -> String {
    match tail(log).as_str() {
        "" => what.to_owned(),
        words => format!("{what}; it said: {words}"),
    }
}

fn tail(log: &Path) -> String {
    let bytes = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(LAST_LINES)..].join(" | ")
}
