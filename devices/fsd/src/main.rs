//! `cube-fsd`: started by the VMM for each share, with two sockets; see the library.

use std::fs::File;
use std::io::Write;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use cube_fsd::identity::look;
use cube_fsd::journal::Journal;
use cube_fsd::service::{Service, Status};
use cube_fsd::share::{Cache, IdRange, Policy, Settings};
use cube_fsd::state::ShareIdentity;
use cube_fsd::tracked::lend::Lender;
use cube_fsd::tracked::{Core, Tracked};
use cube_fsd::{jail, session};
use virtiofsd::passthrough::PassthroughFs;
use virtiofsd::passthrough::read_only::PassthroughFsRo;

/// Descriptors that the server itself needs, beside those of the guest's files.
const OWN_DESCRIPTORS: u64 = 64;

/// Serve a directory to a CubeVMM guest. Started by cube-vmm, which is at the other end of both
/// sockets; there is nothing to be gained from starting it by hand. With --describe as its only option
/// it tells what a saved state on its standard input holds.
#[derive(Parser, Debug)]
#[command(version)]
struct Options {
    /// The directory
    #[arg(long, value_name = "DIR")]
    path: PathBuf,
    /// The name that the guest mounts it by
    #[arg(long)]
    tag: String,
    /// Descriptor of the socket for vhost-user
    #[arg(long, value_name = "FD")]
    vhost: RawFd,
    /// Descriptor of the socket for questions
    #[arg(long, value_name = "FD")]
    control: RawFd,
    /// Descriptor of a file in memory, for what the next server has to know should this one die
    #[arg(long, value_name = "FD")]
    journal: Option<RawFd>,
    /// Descriptor of the socket through which descriptors of files are lent
    #[arg(long, value_name = "FD")]
    lend: Option<RawFd>,
    /// Nothing can be changed
    #[arg(long)]
    read_only: bool,
    /// How long the guest may believe what it was told
    #[arg(long, value_enum, default_value_t = Cache::Auto)]
    cache: Cache,
    /// The guest may keep what is written for a while
    #[arg(long)]
    writeback: bool,
    /// Extended attributes
    #[arg(long)]
    xattr: bool,
    /// POSIX access control lists
    #[arg(long)]
    acl: bool,
    /// Users of the guest that are others on the host
    #[arg(long, value_name = "GUEST:HOST:COUNT")]
    uid_map: Option<IdRange>,
    /// Groups of the guest that are others on the host
    #[arg(long, value_name = "GUEST:HOST:COUNT")]
    gid_map: Option<IdRange>,
    /// What is done at a restore about files that have changed
    #[arg(long, value_enum, default_value_t = Policy::Tolerant)]
    policy: Policy,
    /// Serve without a jail, for development and tests
    #[arg(long)]
    no_jail: bool,
}

impl Options {
    fn settings(&self) -> Settings {
        let &Self { read_only, cache, writeback, xattr, acl, uid_map, gid_map, .. } = self;
        Settings { read_only, cache, writeback, xattr, acl, uid_map, gid_map }
    }
}

/// Which directory it is.
fn identify(options: &Options) -> std::io::Result<ShareIdentity> {
    let directory = File::open(&options.path)?;
    let seen = look(&directory, c"")?;
    if seen.kind != libc::S_IFDIR {
        return Err(std::io::Error::from_raw_os_error(libc::ENOTDIR));
    }
    let mut about = MaybeUninit::<libc::statfs64>::zeroed();
    // SAFETY: an open descriptor, and room for the answer.
    let told = unsafe { libc::fstatfs64(directory.as_raw_fd(), about.as_mut_ptr()) };
    if told != 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: plain numbers, all zero or as the kernel has set them; the identifier is two of them.
    let fsid = unsafe { std::mem::transmute::<libc::fsid_t, u64>(about.assume_init().f_fsid) };
    Ok(ShareIdentity {
        tag: options.tag.clone(),
        path: options.path.display().to_string(),
        ino: seen.identity.ino,
        btime: seen.identity.btime,
        fsid,
    })
}

fn run(options: &Options, vhost: UnixStream, control: &UnixStream) -> Result<(), String> {
    let mut given = vec![options.vhost, options.control];
    given.extend(options.journal.into_iter().chain(options.lend));
    jail::close_others(&mut given).map_err(|error| error.to_string())?;
    let journal =
        journal(options).map_err(|error| format!("its journal cannot be used: {error}"))?;
    let lender = lender(options).map_err(|error| format!("nothing can be lent: {error}"))?;
    let limit = jail::raise_descriptor_limit().saturating_sub(OWN_DESCRIPTORS);
    let path = options.path.display();
    let named = |error: std::io::Error| format!("directory {path} cannot be served: {error}");
    let share = identify(options).map_err(named)?;
    // SAFETY: takes nothing.
    let root = unsafe { libc::geteuid() } == 0;
    if !root && (options.uid_map.is_some() || options.gid_map.is_some()) {
        return Err("uid_map and gid_map take the rights of several users; be root".to_owned());
    }
    let (root, inside) = if options.no_jail {
        let root = options.path.canonicalize().map_err(named)?;
        (root.display().to_string(), None)
    } else {
        let inside = jail::enter(&options.path, options.read_only);
        let failed = |error| format!("directory {path} cannot be served in a jail: {error}");
        ("/".to_owned(), Some(inside.map_err(failed)?))
    };
    let settings = options.settings();
    let mut config = settings.config(&root, limit);
    config.proc_sfd_rawfd = inside.map(|inside| inside.proc_self_fd);
    let restrict = || match options.no_jail {
        true => Ok(()),
        false => jail::drop_privileges().map_err(|error| error.to_string()),
    };
    let share = Share { share, settings, policy: options.policy, limit, journal, lender };
    if options.read_only {
        let core = PassthroughFsRo::new(config).map_err(named)?;
        restrict()?;
        share.serve(core, vhost, control)
    } else {
        let core = PassthroughFs::new(config).map_err(named)?;
        restrict()?;
        share.serve(core, vhost, control)
    }
}

/// All that there is to know of a share before it is served.
struct Share {
    share: ShareIdentity,
    settings: Settings,
    policy: Policy,
    limit: u64,
    journal: Option<Journal>,
    lender: Option<Lender>,
}

impl Share {
    fn serve<F: Core>(
        self,
        core: F,
        vhost: UnixStream,
        control: &UnixStream,
    ) -> Result<(), String> {
        let tracked = Tracked::limited(core, self.limit);
        if let Some(lender) = self.lender {
            tracked.lend_to(lender);
        }
        let mut service = Service::of(tracked, self.share, self.settings, self.policy);
        if let Some(journal) = self.journal {
            service.keep(journal).map_err(|error| error.to_string())?;
        }
        session::serve(service, vhost, control)
            .map_err(|error| format!("the VMM does not speak the protocol: {error}"))
    }
}

fn journal(options: &Options) -> std::io::Result<Option<Journal>> {
    // SAFETY: the descriptor is given to this process for that, and owned by nobody else in it. One that
    // is no file fails when it is looked at.
    let file = options.journal.map(|fd| unsafe { File::from_raw_fd(fd) });
    file.map(Journal::open).transpose()
}

fn lender(options: &Options) -> std::io::Result<Option<Lender>> {
    // SAFETY: as for the journal. One that is no socket fails when it is used.
    let socket = options.lend.map(|fd| unsafe { UnixDatagram::from_raw_fd(fd) });
    socket.map(Lender::new).transpose()
}

fn main() -> ExitCode {
    if std::env::args_os().skip(1).eq(["--describe"]) {
        return match cube_fsd::describe::run() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("cube-fsd: {error}");
                ExitCode::FAILURE
            }
        };
    }
    let options = Options::parse();
    // SAFETY: the descriptors are given to this process for that, and owned by nobody else in it. One
    // that is no socket fails when it is used.
    let (vhost, mut control) = unsafe {
        (UnixStream::from_raw_fd(options.vhost), UnixStream::from_raw_fd(options.control))
    };
    match run(&options, vhost, &control) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            let tag = options.tag.clone();
            let status = Status { tag, error: Some(reason.clone()), ..Status::default() };
            let line = serde_json::to_string(&status).unwrap_or_default() + "\n";
            // The VMM says it to whoever has started it, unless it is gone.
            if control.write_all(line.as_bytes()).is_err() {
                eprintln!("cube-fsd: share {:?}: {reason}", options.tag);
            }
            ExitCode::FAILURE
        }
    }
}
