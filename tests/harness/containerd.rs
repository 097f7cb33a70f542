//! A containerd of the test's own, with the shim under test in its path, and `ctr` to talk to it.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::artifacts::{Artifact, text};
use crate::{cri, eventually, oci_image};

/// The runtime under test.
pub const CUBE: &str = "io.containerd.cube.v2";
/// The one that it is compared with.
pub const RUNC: &str = "io.containerd.runc.v2";
/// How long any one call of `ctr` may take.
const PATIENCE: Duration = Duration::from_secs(180);

/// A containerd that serves.
pub struct Containerd {
    folder: TempDir,
    daemon: Child,
    /// A folder with other programs than those of this machine.
    programs: Option<PathBuf>,
}

/// The folder with another containerd, its `ctr` and its shim for runc, as `tests/harness/go-tool
/// containerd` builds them, if one was given.
pub fn other() -> Option<PathBuf> {
    std::env::var_os("CUBE_CONTAINERD").map(PathBuf::from)
}

/// Whom a containerd serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serves {
    /// `ctr` only.
    Ctr,
    /// Kubernetes, too: see [`crate::cri`].
    Cri,
}

/// How a call of a client has ended.
#[derive(Debug)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Said {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Said {
    /// Runs a command with this input to its end. One that takes too long is killed.
    #[track_caller]
    pub fn of(mut command: Command, input: &[u8]) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let (input, pid) = (input.to_vec(), child.id());
        // Some commands end without having read it.
        std::thread::spawn(move || drop(std::io::Write::write_all(&mut stdin, &input)));
        let (done, ended) = std::sync::mpsc::channel::<()>();
        // ctr passes a request to end on to its task: only this ends it for sure.
        let watch = std::thread::spawn(move || {
            if ended.recv_timeout(PATIENCE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
                let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
            }
        });
        let output = child.wait_with_output().unwrap();
        drop(done);
        watch.join().unwrap();
        Self {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// What it printed, if it ended with this code.
    #[track_caller]
    pub fn output(&self, code: i32) -> &str {
        assert_eq!(self.code, code, "{self:?}");
        &self.stdout
    }
}

impl Default for Containerd {
    fn default() -> Self {
        Self::start()
    }
}

impl Containerd {
    /// Starts one, with the images of [`oci_image`] in it.
    pub fn start() -> Self {
        Self::start_with(Serves::Ctr, "default")
    }

    /// Starts one that serves that, with the images of [`oci_image`] in this namespace.
    pub fn start_with(serves: Serves, namespace: &str) -> Self {
        // Overlay needs a file system that can be an upper one.
        let scratch =
            std::env::var_os("LAB_SCRATCH").map_or_else(std::env::temp_dir, PathBuf::from);
        let folder = tempfile::Builder::new().prefix("cube-ctr-").tempdir_in(scratch).unwrap();
        fs::create_dir(folder.path().join("bin")).unwrap();
        let shim = folder.path().join("bin/containerd-shim-cube-v2");
        std::os::unix::fs::symlink(Artifact::Shim.arg(), shim).unwrap();
        write_settings(folder.path(), serves);
        let daemon = start(folder.path(), None);
        let this = Self { folder, daemon, programs: None };
        this.serves();
        let archive = oci_image::archive(&this.made("image"));
        this.ctr(["-n", namespace, "images", "import", &text(&archive)]).output(0);
        this
    }

    fn made(&self, name: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::create_dir_all(&path).unwrap();
        path
    }

    /// A folder of the host, for a test.
    pub fn folder(&self, name: &str) -> PathBuf {
        self.made(name)
    }

    fn serves(&self) {
        eventually("containerd serves", || self.ctr(["version"]).code == 0);
    }

    /// The command line of a call of `ctr`.
    pub fn command<'a>(&self, words: impl IntoIterator<Item = &'a str>) -> Command {
        let mut command = match &self.programs {
            Some(programs) => Command::new(programs.join("ctr")),
            None => Command::new("ctr"),
        };
        command.arg("--address").arg(self.socket()).args(words);
        command
    }

    /// Calls `ctr` with no input.
    #[track_caller]
    pub fn ctr<'a>(&self, words: impl IntoIterator<Item = &'a str>) -> Said {
        self.ctr_with(b"", words)
    }

    /// Calls `ctr` with this input.
    #[track_caller]
    pub fn ctr_with<'a>(&self, input: &[u8], words: impl IntoIterator<Item = &'a str>) -> Said {
        Said::of(self.command(words), input)
    }

    /// Runs a container with that runtime to its end.
    #[track_caller]
    pub fn run(&self, runtime: &str, id: &str, command: &[&str]) -> Said {
        let words = ["run", "--rm", "--runtime", runtime, oci_image::NAME, id];
        self.ctr(words.into_iter().chain(command.iter().copied()))
    }

    /// Starts a container that stays, in the background.
    #[track_caller]
    pub fn detach(&self, id: &str, command: &[&str]) {
        let words = ["run", "-d", "--runtime", CUBE, oci_image::NAME, id];
        self.ctr(words.into_iter().chain(command.iter().copied())).output(0);
    }

    /// Runs a further process in a container.
    #[track_caller]
    pub fn exec(&self, id: &str, exec: &str, command: &[&str]) -> Said {
        let words = ["tasks", "exec", "--exec-id", exec, id];
        self.ctr(words.into_iter().chain(command.iter().copied()))
    }

    /// The state that containerd tells of a task; nothing if there is none.
    #[track_caller]
    pub fn state(&self, id: &str) -> Option<String> {
        let list = self.ctr(["tasks", "ls"]);
        let line =
            list.output(0).lines().find(|line| line.split_whitespace().next() == Some(id))?;
        line.split_whitespace().nth(2).map(str::to_owned)
    }

    /// Ends a task by force and removes it and its container.
    #[track_caller]
    pub fn remove(&self, id: &str) {
        self.ctr(["tasks", "kill", "-s", "SIGKILL", id]);
        eventually("the task ends", || !matches!(self.state(id).as_deref(), Some("RUNNING")));
        self.ctr(["tasks", "rm", "-f", id]);
        self.ctr(["containers", "rm", id]).output(0);
    }

    /// Ends the daemon, as an upgrade does: what it has started lives on.
    pub fn stop_daemon(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }

    /// Starts it again.
    pub fn start_daemon(&mut self) {
        self.daemon = start(self.folder.path(), self.programs.as_deref());
        self.serves();
    }

    /// Starts another one in its place, of the programs in that folder.
    pub fn start_other(&mut self, programs: PathBuf) {
        self.programs = Some(programs);
        self.start_daemon();
    }

    /// Its socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("containerd.sock")
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.daemon.id()
    }

    /// What containerd has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// The lines of the log that tell how long the calls of a container took, and their operation.
    pub fn ladders(&self, id: &str) -> Vec<(String, serde_json::Value)> {
        let log = self.log();
        let lines = log.lines().filter(|line| line.starts_with("{\"event\":\"ladder\""));
        let told = lines.map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let of_it = told.filter(|line| line["container"] == id);
        of_it.map(|line| (line["operation"].as_str().unwrap().to_owned(), line)).collect()
    }

    /// What the runtime has on this host, in words: processes, mounts, sockets, folders, control
    /// groups.
    pub fn leftovers() -> Vec<String> {
        let mut left = processes(&["containerd-shim-cube", "cube-vmm", "cube-fsd"]);
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        left.extend(mounts.lines().filter(|line| line.contains("/run/cube/")).map(str::to_owned));
        for folder in ["/run/cube", "/run/containerd/s"] {
            let entries = fs::read_dir(folder).into_iter().flatten();
            let paths = entries.map(|entry| entry.unwrap().path().display().to_string());
            left.extend(paths.filter(|path| path != "/run/cube/lock"));
        }
        left.extend(control_groups(Path::new("/sys/fs/cgroup")));
        left
    }

    /// The snapshots of sandboxes that are paused to disk.
    pub fn asleep(&self) -> Vec<String> {
        let beds = fs::read_dir(self.made("paused")).unwrap();
        let beds = beds.map(|bed| bed.unwrap().path());
        let snapshots = beds.flat_map(|bed| fs::read_dir(bed).unwrap());
        snapshots.map(|snapshot| text(&snapshot.unwrap().path())).collect()
    }

    /// Waits until the runtime has left nothing.
    #[track_caller]
    pub fn assert_clean(&self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let mut left = Self::leftovers();
            left.extend(self.asleep());
            if left.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "left behind: {left:#?}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("containerd's log:\n{}", self.log());
        } else {
            self.assert_clean();
        }
        self.stop_daemon();
    }
}

/// The processes whose program has one of these names at the beginning.
pub fn processes(names: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap() {
        let path = entry.unwrap().path();
        let Ok(line) = fs::read(path.join("cmdline")) else { continue };
        let program = line.split(|byte| *byte == 0).next().unwrap_or_default();
        let program = String::from_utf8_lossy(program).into_owned();
        let name = Path::new(&program).file_name().unwrap_or_default().to_string_lossy();
        if names.iter().any(|wanted| name.starts_with(wanted)) {
            found.push(format!("{} {name}", path.display()));
        }
    }
    found
}

/// The control groups of the runtime's at a folder and below.
fn control_groups(folder: &Path) -> Vec<String> {
    // They come and go.
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let below = folders.flat_map(|entry| {
        let own = entry.file_name().to_string_lossy().starts_with("cube-");
        let own = own.then(|| text(&entry.path()));
        own.into_iter().chain(control_groups(&entry.path()))
    });
    below.collect()
}

fn write_settings(folder: &Path, serves: Serves) {
    let path = |name: &str| text(&folder.join(name));
    let (first, last, memory_mib) = match serves {
        Serves::Ctr => ("disabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n", String::new(), 192),
        Serves::Cri => ("", cri::settings(folder), 448),
    };
    let containerd = format!(
        "version = 2\nroot = {:?}\nstate = {:?}\n{first}[grpc]\n  address = {:?}\n{last}",
        path("root"),
        path("state"),
        path("containerd.sock"),
    );
    fs::write(folder.join("containerd.toml"), containerd).unwrap();
    let cube = format!(
        "vmm = {:?}\nkernel = {:?}\ninitrd = {:?}\nmemory_mib = {memory_mib}\nboot_timeout_s = 120\n\
         pause_dir = {:?}\nannotation_dirs = [{:?}]\n",
        Artifact::Vmm.arg(),
        Artifact::Kernel.arg(),
        Artifact::ContainerInitrd.arg(),
        path("paused"),
        text(folder),
    );
    fs::write(folder.join("cube.toml"), cube).unwrap();
}

fn start(folder: &Path, programs: Option<&Path>) -> Child {
    let log = File::options().create(true).append(true).open(folder.join("log")).unwrap();
    let mut path = std::env::var("PATH").unwrap_or_default();
    if let Some(programs) = programs {
        path = format!("{}:{path}", programs.display());
    }
    let program = programs.map_or_else(|| "containerd".into(), |folder| folder.join("containerd"));
    let mut command = Command::new(program);
    command
        .arg("--config")
        .arg(folder.join("containerd.toml"))
        .env("PATH", format!("{}:{path}", folder.join("bin").display()))
        .env("CUBE_CONFIG", folder.join("cube.toml"))
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log);
    // SAFETY: prctl takes numbers.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
    command.spawn().expect("no containerd: apt-get install containerd runc")
}
