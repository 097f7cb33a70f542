//! A share that is served in this process: what it is to a guest, without rings and jails.

use std::fs::File;
use std::path::Path;

use cube_fsd::journal::Journal;
use cube_fsd::restore::{Report, RestoreError};
use cube_fsd::service::Service;
use cube_fsd::share::{Policy, Settings};
use cube_fsd::state::ShareIdentity;
use cube_fsd::tracked::{Count, Tracked};
use virtiofsd::passthrough::PassthroughFs;
use virtiofsd::passthrough::read_only::PassthroughFsRo;

use crate::guest::{Answers, Guest};

/// Either kind of share.
pub enum Local {
    Writable(Box<Service<PassthroughFs>>),
    ReadOnly(Box<Service<PassthroughFsRo>>),
}

impl Answers for Local {
    fn ask(&mut self, request: &[u8], room: usize) -> Vec<u8> {
        match self {
            Self::Writable(service) => service.ask(request, room),
            Self::ReadOnly(service) => service.ask(request, room),
        }
    }
}

pub fn identity(path: &Path) -> ShareIdentity {
    let directory = std::fs::File::open(path).unwrap();
    let seen = cube_fsd::identity::look(&directory, c"").unwrap();
    ShareIdentity {
        tag: "work".into(),
        path: path.display().to_string(),
        ino: seen.identity.ino,
        btime: seen.identity.btime,
        fsid: 0,
    }
}

impl Local {
    pub fn limited(path: &Path, settings: Settings, policy: Policy, most: u64) -> Self {
        let core = PassthroughFs::new(settings.config(path.to_str().unwrap(), most)).unwrap();
        let tracked = Tracked::limited(core, most);
        Self::Writable(Box::new(Service::of(tracked, identity(path), settings, policy)))
    }

    /// One that keeps what its guest knows in `journal`, and goes on from what is in it.
    pub fn keeping(path: &Path, journal: &File) -> Result<Self, RestoreError> {
        let mut this = Self::new(path, Settings::default(), Policy::Tolerant);
        let Self::Writable(service) = &mut this else { panic!("it is read-only") };
        service.keep(Journal::open(journal.try_clone().unwrap()).unwrap())?;
        Ok(this)
    }

    pub fn count(&self) -> Count {
        match self {
            Self::Writable(service) => service.status().count,
            Self::ReadOnly(service) => service.status().count,
        }
    }

    /// Looks up what a restore has left for later.
    pub fn verify_all(&mut self) -> Report {
        let Self::Writable(service) = self else { panic!("it is read-only") };
        while service.is_busy() {
            service.verify();
        }
        service.status().restored.unwrap()
    }

    pub fn new(path: &Path, settings: Settings, policy: Policy) -> Self {
        let config = settings.config(path.to_str().unwrap(), u64::MAX);
        let share = identity(path);
        if settings.read_only {
            let core = PassthroughFsRo::new(config).unwrap();
            return Self::ReadOnly(Box::new(Service::new(core, share, settings, policy)));
        }
        let core = PassthroughFs::new(config).unwrap();
        Self::Writable(Box::new(Service::new(core, share, settings, policy)))
    }

    pub fn save(&mut self) -> Vec<u8> {
        match self {
            Self::Writable(service) => service.save().unwrap(),
            Self::ReadOnly(service) => service.save().unwrap(),
        }
    }

    pub fn load(&mut self, bytes: &[u8]) -> Result<Option<Report>, RestoreError> {
        match self {
            Self::Writable(service) => service.load(bytes).map(|()| service.status().restored),
            Self::ReadOnly(service) => service.load(bytes).map(|()| service.status().restored),
        }
    }
}

/// A guest that has mounted the directory.
pub fn mounted(path: &Path) -> Guest<Local> {
    let mut guest = Guest::new(Local::new(path, Settings::default(), Policy::Tolerant));
    guest.mount();
    guest
}

/// The guest goes on with a new server for `path`, after the old one has ended.
pub fn moved(
    mut guest: Guest<Local>,
    path: &Path,
    settings: Settings,
    policy: Policy,
) -> Result<(Guest<Local>, Report), RestoreError> {
    let state = guest.server.save();
    // The old one ends before the new one begins.
    let guest = guest.with(());
    let mut server = Local::new(path, settings, policy);
    let report = server.load(&state)?.unwrap_or_default();
    Ok((guest.with(server), report))
}

/// The same directory, the usual way.
pub fn restored(guest: Guest<Local>, path: &Path) -> (Guest<Local>, Report) {
    moved(guest, path, Settings::default(), Policy::Tolerant).unwrap()
}
