//! `delete`: what containerd runs when a shim is gone, or seems to be, and after each orderly end
//! too. Ends and clears whatever is left, within containerd's five seconds, and tells how the
//! container has ended. Done twice it does nothing.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use containerd_shim::Flags;
use containerd_shim_protos::api::DeleteResponse;
use containerd_shim_protos::protobuf::{Message, MessageField};

use crate::bootstrap::{self, Form, Start};
use crate::clock::{from_nanos, nanos, timestamp};
use crate::error::{Error, Result, io};
use crate::place::Place;
use crate::record::{self, Exit, Identity};
use crate::start::{sandbox_of, socket};
use crate::strays::Of;
use crate::vmm::kill;

/// What is told of a container that nobody has seen the end of: killed, as it was.
const KILLED: u32 = 137;
/// How long processes that were killed may take to be gone.
const GONE: Duration = Duration::from_secs(2);

/// Does it.
pub fn delete(flags: &Flags) -> Result<()> {
    bootstrap::check_name("id", &flags.id)?;
    bootstrap::check_name("namespace", &flags.namespace)?;
    let bundle = match flags.bundle.as_str() {
        "" => std::env::current_dir().map_err(io("find the bundle"))?,
        bundle => PathBuf::from(bundle),
    };
    // A bundle that is half gone says nothing of a pod: the container's own sandbox then.
    let sandbox = sandbox_of(&bundle, &flags.id).unwrap_or_else(|_| flags.id.clone());
    let start = Start {
        namespace: flags.namespace.clone(),
        id: flags.id.clone(),
        address: match flags.address.as_str() {
            "" => std::env::var("GRPC_ADDRESS").unwrap_or_default(),
            address => address.to_owned(),
        },
        ttrpc_address: String::new(),
        socket_dir: None,
        debug: flags.debug,
        form: Form::Bare,
    };
    let socket = socket(&start, &sandbox);
    let place = Place::of(&socket);
    let (namespace, address) = (start.namespace.as_str(), start.address.as_str());
    // A container that is gone takes nobody else of its pod along.
    if sandbox == flags.id || !shim_lives(&place) {
        end(&Of { namespace, address, ids: &[&flags.id, &sandbox] }.find());
        end_sandbox(&place, &socket)?;
    } else {
        end(&Of { namespace, address, ids: &[&flags.id] }.find());
        place.clear_container(&flags.id)?;
    }
    answer(&bundle)
}

fn shim_lives(place: &Place) -> bool {
    let record: Option<record::Sandbox> = record::read(&place.file(record::SANDBOX));
    record.is_some_and(|record| record.shim.lives())
}

fn end_sandbox(place: &Place, socket: &Path) -> Result<()> {
    end_processes(place);
    let _ = std::fs::remove_file(socket);
    place.clear()
}

/// The VMM first: it is what must not be left. Neither a shim that hangs nor a file server that is
/// stopped ends by itself.
pub fn end_processes(place: &Place) {
    if let Some(record) = record::read::<record::Sandbox>(&place.file(record::SANDBOX)) {
        let all: Vec<Identity> = record.vmm.into_iter().chain([record.shim]).collect();
        all.iter().for_each(kill);
        if let Some(Err(error)) = record.group.map(|group| group.end()) {
            // Goes into containerd's log, as a warning.
            eprintln!("a control group is left: {error}");
        }
        end(&all);
    }
}

/// Kills processes, and waits until they are gone.
fn end(all: &[Identity]) {
    let deadline = Instant::now() + GONE;
    all.iter().for_each(kill);
    while all.iter().any(Identity::lives) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn answer(bundle: &Path) -> Result<()> {
    let unseen = Exit { status: KILLED, unix_nanos: nanos(SystemTime::now()), pid: 0 };
    let exit = record::read(&bundle.join(record::EXIT)).unwrap_or(unseen);
    let response = DeleteResponse {
        pid: exit.pid,
        exit_status: exit.status,
        exited_at: MessageField::some(timestamp(from_nanos(exit.unix_nanos))),
        ..Default::default()
    };
    let bytes = response.write_to_bytes().map_err(|error| Error::Invalid(error.to_string()))?;
    std::io::stdout().write_all(&bytes).map_err(io("answer containerd"))
}
