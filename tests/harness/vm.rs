//! A guest that stays: `cube-vmm start` in a place of its own, ready for commands.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use guest_protocol::{Client, HybridSocket, Spawn};
use hypervisor::api::{Info, MetricsFormat, Reply, Request, SnapshotRequest, StopHow};
use hypervisor::api_socket;
use hypervisor::state::VmState;
use nix::sys::signal::Signal;

use crate::call::{Call, Ended, Running};
use crate::guest::{GuestProcess, Output, sh};
use crate::place::{BOOT_TIMEOUT, Place};

/// A guest that is not ready by then never will be. The lab is slow.
const BOOTS_WITHIN: Duration = Duration::from_secs(320);
/// How long the end of a VM that is killed may take.
const ENDS_WITHIN: Duration = Duration::from_secs(30);

/// A `cube-vmm start` that has not been called yet.
pub struct Builder {
    place: Place,
    arguments: Vec<String>,
}

impl Builder {
    /// Any option of `cube-vmm start`.
    #[must_use]
    pub fn option(mut self, name: &str, value: impl Into<String>) -> Self {
        self.arguments.extend([name.to_owned(), value.into()]);
        self
    }

    /// Number of vCPUs.
    #[must_use]
    pub fn cpus(self, count: u32) -> Self {
        self.option("--cpus", count.to_string())
    }

    /// Guest memory, such as `256M`.
    #[must_use]
    pub fn memory(self, size: &str) -> Self {
        self.option("--memory", size)
    }

    /// Its devices on a PCI bus.
    #[must_use]
    pub fn pci(self) -> Self {
        self.option("--transport", "pci")
    }

    /// Its devices on `mmio` or `pci`.
    #[must_use]
    pub fn transport(self, transport: &str) -> Self {
        self.option("--transport", transport)
    }

    /// A disk, in the words of `--disk`. Relative paths start at the place's working folder.
    #[must_use]
    pub fn disk(self, disk: impl Into<String>) -> Self {
        self.option("--disk", disk)
    }

    /// An image that becomes the guest's root.
    #[must_use]
    pub fn rootfs(self, image: &str) -> Self {
        self.option("--rootfs", image)
    }

    /// The place, for files that the VM is given.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Starts it, and waits until the guest is ready.
    ///
    /// # Panics
    /// If it does not get so far.
    #[track_caller]
    pub fn boot(self) -> TestVm {
        let Self { place, arguments } = self;
        let (api, vsock) = (PathBuf::from(place.path("api")), PathBuf::from(place.path("vsock")));
        let call: Call<'_> = place.call(["start", "--api-socket", "api", "--vsock"]);
        let running = call
            .arguments([vsock.as_os_str()])
            .arguments(["--boot-timeout", BOOT_TIMEOUT])
            .arguments(&arguments)
            .start();
        let mut vm = TestVm { running: Some(running), api, vsock, place };
        vm.wait_until("ready", |info| info.ready);
        vm
    }
}

/// A guest that is ready. Dropped, it is killed, and nothing of it may be left.
pub struct TestVm {
    // Taken by whoever waits for its end.
    running: Option<Running>,
    api: PathBuf,
    vsock: PathBuf,
    // After the process, which it looks for.
    place: Place,
}

impl TestVm {
    /// What it shall be.
    pub fn builder() -> Builder {
        Self::builder_in(Place::new())
    }

    /// What it shall be, in a place that exists already.
    pub fn builder_in(place: Place) -> Builder {
        Builder { place, arguments: Vec::new() }
    }

    /// A guest like any other.
    ///
    /// # Panics
    /// If it does not boot.
    #[track_caller]
    pub fn boot() -> Self {
        Self::builder().boot()
    }

    /// A guest that goes on where the snapshot in `dir` was taken; any options of
    /// `cube-vmm restore`.
    ///
    /// # Panics
    /// If it does not get ready.
    #[track_caller]
    pub fn restore(dir: &Path, options: &[&str]) -> Self {
        let mut vm = Self::restored(dir, &[options, &["--resume"]].concat());
        vm.wait_until("ready", |info| info.ready);
        vm
    }

    /// A guest that stands still where the snapshot in `dir` was taken; any options of
    /// `cube-vmm restore`.
    ///
    /// # Panics
    /// If there is none.
    #[track_caller]
    pub fn restore_paused(dir: &Path, options: &[&str]) -> Self {
        let mut vm = Self::restored(dir, options);
        vm.wait_until("paused", |info| info.state == VmState::Paused);
        vm
    }

    fn restored(dir: &Path, options: &[&str]) -> Self {
        let place = Place::new();
        let (api, vsock) = (PathBuf::from(place.path("api")), PathBuf::from(place.path("vsock")));
        let call = place.call(["restore", "--api-socket", "api", "--override"]);
        let call = call.arguments([format!("vsock={}", vsock.display())]).arguments(options);
        let running = call.arguments([dir]).start();
        Self { running: Some(running), api, vsock, place }
    }

    /// Lets a guest of [`TestVm::restore_paused`] go on, and waits until it is ready.
    ///
    /// # Panics
    /// If it does not get ready.
    #[track_caller]
    pub fn resume(&mut self) {
        self.ask(&Request::Resume {});
        self.wait_until("ready", |info| info.ready);
    }

    #[track_caller]
    fn wait_until(&mut self, what: &str, is_so: impl Fn(&Info) -> bool) {
        let deadline = Instant::now() + BOOTS_WITHIN;
        loop {
            let answer = api_socket::request(&self.api, &Request::Info {});
            if let Ok(Reply::Info(info)) = &answer
                && is_so(info)
            {
                return;
            }
            if self.running_mut().has_ended() {
                let ended = self.running.take().unwrap().end();
                panic!("the VM ended instead of getting {what}: {ended:?}");
            }
            assert!(Instant::now() < deadline, "not {what} in {BOOTS_WITHIN:?}: {answer:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn running_mut(&mut self) -> &mut Running {
        self.running.as_mut().expect("it runs until it is waited for")
    }

    /// The process that holds it.
    pub fn running(&self) -> &Running {
        self.running.as_ref().expect("it runs until it is waited for")
    }

    /// Process id of the VMM.
    pub fn pid(&self) -> u32 {
        self.running().pid()
    }

    /// Its control socket.
    pub fn api_socket(&self) -> &Path {
        &self.api
    }

    /// Its vsock socket.
    pub fn vsock(&self) -> &Path {
        &self.vsock
    }

    /// Its place.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// A call of `cube-vmm` about it: a subcommand, then its other arguments.
    pub fn cli(&self, subcommand: &str, arguments: &[&str]) -> Call<'_> {
        let call = self.place.call(subcommand.split(' ').chain(["--api-socket"]));
        call.arguments([self.api.as_os_str()]).arguments(arguments)
    }

    /// Sends a request and gives the answer.
    ///
    /// # Panics
    /// If there is none.
    #[track_caller]
    pub fn request(&self, request: &Request) -> Reply {
        api_socket::request(&self.api, request).unwrap()
    }

    /// Sends a request that is to be carried out.
    ///
    /// # Panics
    /// If it is not.
    #[track_caller]
    pub fn ask(&self, request: &Request) {
        assert_eq!(self.request(request), Reply::Done, "{request:?}");
    }

    /// Writes it into the folder `dir`, whole, and leaves it paused.
    ///
    /// # Panics
    /// If that is refused.
    #[track_caller]
    pub fn save(&self, dir: &Path) {
        let request = SnapshotRequest { keep_paused: true, ..SnapshotRequest::new(dir) };
        let reply = self.request(&Request::Snapshot(request));
        assert!(matches!(reply, Reply::Saved(_)), "{reply:?}");
    }

    /// What it tells of itself.
    ///
    /// # Panics
    /// If it does not.
    #[track_caller]
    pub fn info(&self) -> Info {
        match self.request(&Request::Info {}) {
            Reply::Info(info) => *info,
            reply => panic!("info was answered with {reply:?}"),
        }
    }

    /// What a device has counted under a name, without the name's prefix.
    ///
    /// # Panics
    /// If it does not count that.
    #[track_caller]
    pub fn count(&self, name: &str, device: &str) -> u64 {
        let request = Request::Metrics { format: MetricsFormat::Json };
        let Reply::Metrics { families } = self.request(&request) else { panic!("no metrics") };
        let name = format!("cubevmm_{name}");
        let samples = families.iter().filter(|family| family.name == name).flat_map(|f| &f.samples);
        let of_device = samples.clone().find(|s| s.labels.values().any(|value| value == device));
        let names = samples.collect::<Vec<_>>();
        of_device.unwrap_or_else(|| panic!("no {name} of {device}: {names:?}")).value
    }

    /// Sends raw bytes as one conversation on the control socket; gives all that is answered until
    /// `lines` lines have come or the other side closes.
    pub fn converse(&self, bytes: &[u8], lines: usize) -> Vec<String> {
        let mut stream = UnixStream::connect(&self.api).unwrap();
        stream.set_read_timeout(Some(ENDS_WITHIN)).unwrap();
        // The other side may stop reading and close before all is written.
        let _ = stream.write_all(bytes);
        let answers = BufReader::new(stream).lines().take(lines);
        answers.map_while(Result::ok).collect()
    }

    /// The agent.
    ///
    /// # Panics
    /// If it cannot be reached.
    #[track_caller]
    pub fn agent(&self) -> Client {
        Client::connect(HybridSocket::new(&self.vsock)).unwrap()
    }

    /// Puts a program into the guest, and gives its path there.
    ///
    /// # Panics
    /// If it cannot be.
    #[track_caller]
    pub fn install(&self, name: &str, program: &[u8]) -> String {
        let path = format!("/tmp/{name}");
        let line = format!("cat >{path} && chmod 755 {path}");
        assert!(self.exec_with(sh(&line), program).status.success());
        path
    }

    /// Starts a command in the guest.
    ///
    /// # Panics
    /// If it cannot be started.
    #[track_caller]
    pub fn start(&self, spawn: Spawn) -> GuestProcess {
        GuestProcess::start(&self.vsock, spawn).unwrap()
    }

    /// Starts a command in the guest that goes on by itself.
    ///
    /// # Panics
    /// If it cannot be started.
    #[track_caller]
    pub fn leave<'w>(&self, argv: impl IntoIterator<Item = &'w str>) {
        self.agent().spawn(Spawn::new(argv)).unwrap();
    }

    /// Whether the agent answers soon.
    pub fn agent_answers(&self) -> bool {
        let soon = Duration::from_secs(2);
        let socket = HybridSocket::new(&self.vsock).timeout(soon);
        let ping = |mut agent: Client| {
            agent.set_timeout(Some(soon));
            agent.ping()
        };
        Client::connect(socket).and_then(ping).is_ok()
    }

    /// Runs a command in the guest.
    ///
    /// # Panics
    /// If it cannot be started.
    #[track_caller]
    pub fn exec<'w>(&self, argv: impl IntoIterator<Item = &'w str>) -> Output {
        self.start(Spawn::new(argv)).end()
    }

    /// Runs a command in the guest that reads `input`.
    ///
    /// # Panics
    /// If it cannot be started, or does not read.
    #[track_caller]
    pub fn exec_with<'w>(&self, argv: impl IntoIterator<Item = &'w str>, input: &[u8]) -> Output {
        let mut process = self.start(Spawn::new(argv));
        process.feed(input);
        process.end()
    }

    /// Kills the VMM, which cannot clean up then, and gives the place in which that shows.
    ///
    /// # Panics
    /// If it does not die.
    #[track_caller]
    pub fn murder(mut self) -> Place {
        let running = self.running.take().expect("it runs until now");
        running.signal(Signal::SIGKILL);
        assert_eq!(running.end_within(ENDS_WITHIN).code, 137);
        std::mem::take(&mut self.place)
    }

    /// Waits for the VM's end, which somebody else has brought about. Nothing may be left of it.
    ///
    /// # Panics
    /// If it does not end, or leaves something.
    #[track_caller]
    pub fn end(self) -> Ended {
        self.end_keeping_place().0
    }

    /// The same, and gives the place with the files that the VM was given.
    ///
    /// # Panics
    /// If it does not end, or leaves something.
    #[track_caller]
    pub fn end_keeping_place(mut self) -> (Ended, Place) {
        let ended = self.running.take().expect("it runs until now").end_within(ENDS_WITHIN);
        self.place.assert_clean();
        (ended, std::mem::take(&mut self.place))
    }
}

impl Drop for TestVm {
    fn drop(&mut self) {
        let Some(running) = self.running.take() else { return };
        if std::thread::panicking() {
            let said = running.stderr.so_far();
            eprintln!("the VM's standard error:\n{}", String::from_utf8_lossy(&said));
            return;
        }
        let kill = Request::Stop { how: StopHow::Kill, timeout_ms: 0 };
        api_socket::request(&self.api, &kill).unwrap();
        let ended = running.end_within(ENDS_WITHIN);
        assert_eq!(ended.code, 0, "the end of the VM: {ended:?}");
    }
}
