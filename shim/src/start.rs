//! `start`: finds the shim that shall take a new container, or makes one, and tells containerd
//! where it listens. Nothing but that answer may ever be printed.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use containerd_shim::Flags;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use crate::bootstrap::{self, Start};
use crate::error::{Error, Result, io};
use crate::{lifecycle, place, spec};

/// The descriptor that a daemon finds its listener at.
pub const LISTENER: i32 = 3;
/// In the bundle: where the shim listens, for a containerd that was started anew.
const ADDRESS: &str = "address";
/// In the bundle: what a shim says before it has a log.
const ERRORS: &str = "shim.stderr";
/// How long other starts are waited for, each of which takes moments.
const PATIENCE: Duration = Duration::from_secs(20);

/// Where the shim of a sandbox listens: the name is the same for all containers of a sandbox.
pub fn socket(start: &Start, sandbox: &str) -> PathBuf {
    let address = containerd_shim::socket_address(&start.address, &start.namespace, sandbox);
    let path = PathBuf::from(address.trim_start_matches("unix://"));
    match (&start.socket_dir, path.file_name()) {
        (Some(dir), Some(name)) => Path::new(dir).join(name),
        _ => path,
    }
}

/// The sandbox that the container in this bundle belongs to.
pub fn sandbox_of(bundle: &Path, id: &str) -> Result<String> {
    // A sandbox without a container of its own has no spec.
    if !bundle.join("config.json").exists() {
        return Ok(id.to_owned());
    }
    let spec = lifecycle::read_spec(bundle)?;
    let sandbox = spec::group(&spec).unwrap_or(id);
    bootstrap::check_name("sandbox", sandbox)?;
    Ok(sandbox.to_owned())
}

/// Does it, with the bundle as the working directory.
pub fn start(flags: &Flags) -> Result<()> {
    let start = Start::new(flags, &bootstrap::input()?, |name| std::env::var(name).ok())?;
    let bundle = std::env::current_dir().map_err(io("find the working directory"))?;
    let sandbox = sandbox_of(&bundle, &start.id)?;
    let socket = socket(&start, &sandbox);
    let address = format!("unix://{}", socket.display());
    // The containers of a pod may be started at once, and shall find one shim.
    let lock = lock()?;
    if UnixStream::connect(&socket).is_err() {
        let listener = listen(&socket)?;
        let spawned = spawn(&start, &sandbox, &bundle, &listener);
        if spawned.is_err() {
            let _ = fs::remove_file(&socket);
        }
        spawned?;
    } else if sandbox == start.id {
        return Err(Error::Exists(format!("a shim of {sandbox} at {address}")));
    }
    drop(lock);
    write(&bundle.join(ADDRESS), address.as_bytes())?;
    let mut stdout = std::io::stdout();
    stdout.write_all(&start.answer(&address)?).map_err(io("answer containerd"))?;
    stdout.flush().map_err(io("answer containerd"))
}

fn lock() -> Result<Flock<File>> {
    fs::create_dir_all(place::ROOT).map_err(io(format!("make {}", place::ROOT)))?;
    lock_in_time(&Path::new(place::ROOT).join("lock"), PATIENCE)
}

/// Locks a file, which says who has locked it. One who is stopped meanwhile must not stop all others.
fn lock_in_time(path: &Path, patience: Duration) -> Result<Flock<File>> {
    let failed = |what: &str| format!("{what} {}", path.display());
    let options = File::options().read(true).write(true).create(true).truncate(false).open(path);
    let mut file = options.map_err(io(failed("make")))?;
    let deadline = Instant::now() + patience;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(mut lock) => {
                let said = lock.set_len(0).and_then(|()| writeln!(lock, "{}", std::process::id()));
                said.map_err(io(failed("write")))?;
                return Ok(lock);
            }
            Err((back, Errno::EWOULDBLOCK)) if Instant::now() < deadline => file = back,
            Err((_, Errno::EWOULDBLOCK)) => {
                let holder = fs::read_to_string(path).unwrap_or_default();
                return Err(Error::Unavailable(format!(
                    "process {} has held {} for {} s; if it is stopped, kill it",
                    holder.trim(),
                    path.display(),
                    patience.as_secs()
                )));
            }
            Err((_, errno)) => return Err(io(failed("lock"))(errno)),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn listen(socket: &Path) -> Result<UnixListener> {
    if let Some(folder) = socket.parent() {
        fs::create_dir_all(folder).map_err(io(format!("make {}", folder.display())))?;
    }
    // Nobody answers there: it is a dead one's.
    let _ = fs::remove_file(socket);
    UnixListener::bind(socket).map_err(io(format!("listen on {}", socket.display())))
}

/// Starts the daemon, which outlives us, and has none of the descriptors that containerd waits at.
fn spawn(start: &Start, sandbox: &str, bundle: &Path, listener: &UnixListener) -> Result<()> {
    let program = std::env::current_exe().map_err(io("find this program"))?;
    let errors = File::create(bundle.join(ERRORS)).map_err(io("make the shim's error file"))?;
    let mut command = Command::new(program);
    command
        .args(["-namespace", &start.namespace, "-id", sandbox, "-address", &start.address])
        .args(start.debug.then_some("-debug"))
        .env("TTRPC_ADDRESS", &start.ttrpc_address)
        .current_dir(bundle)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(errors);
    let fd = listener.as_raw_fd();
    // SAFETY: the child calls dup2 and setsid, which take numbers.
    unsafe { command.pre_exec(move || become_daemon(fd)) };
    command.spawn().map(drop).map_err(io("start the shim"))
}

fn become_daemon(listener: i32) -> std::io::Result<()> {
    // SAFETY: takes numbers; the descriptor at 3, if there is one, is not used by this child.
    let duplicated = unsafe { libc::dup2(listener, LISTENER) };
    if duplicated < 0 {
        return Err(std::io::Error::last_os_error());
    }
    if listener == LISTENER {
        // The same number keeps its flag, which would close it.
        // SAFETY: takes numbers.
        unsafe { libc::fcntl(LISTENER, libc::F_SETFD, 0) };
    }
    // SAFETY: takes nothing.
    unsafe { libc::setsid() };
    Ok(())
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).map_err(io(format!("write {}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::Form;

    fn told() -> Start {
        Start {
            namespace: "default".to_owned(),
            id: "web".to_owned(),
            address: "/run/containerd/containerd.sock".to_owned(),
            ttrpc_address: String::new(),
            socket_dir: None,
            debug: false,
            form: Form::Bare,
        }
    }

    #[test]
    fn a_sandbox_has_one_socket_and_containerd_may_say_where() {
        let here = socket(&told(), "web");
        assert!(here.starts_with("/run/containerd/s"), "{}", here.display());
        let elsewhere = Start { socket_dir: Some("/run/x".to_owned()), ..told() };
        assert_eq!(socket(&elsewhere, "web"), Path::new("/run/x").join(here.file_name().unwrap()));
        assert_ne!(socket(&told(), "other"), here);
    }

    #[test]
    fn who_holds_the_lock_for_too_long_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        fs::write(&path, "4194303 of before").unwrap();
        let lock = lock_in_time(&path, PATIENCE).unwrap();
        let refused = lock_in_time(&path, Duration::from_millis(20)).unwrap_err().to_string();
        let us = format!("process {} has held {}", std::process::id(), path.display());
        assert!(refused.starts_with(&us), "{refused}");
        drop(lock);
        lock_in_time(&path, PATIENCE).unwrap();
    }

    #[test]
    fn a_container_without_a_pod_is_its_own_sandbox() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(sandbox_of(dir.path(), "web").unwrap(), "web");
        let spec = r#"{"annotations": {"io.kubernetes.cri.sandbox-id": "pod"}}"#;
        fs::write(dir.path().join("config.json"), spec).unwrap();
        assert_eq!(sandbox_of(dir.path(), "web").unwrap(), "pod");
        let spec = r#"{"annotations": {"io.kubernetes.cri.sandbox-id": "../x"}}"#;
        fs::write(dir.path().join("config.json"), spec).unwrap();
        assert!(sandbox_of(dir.path(), "web").is_err());
    }
}
