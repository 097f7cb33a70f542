//! `checkpoint`: asks the shim of a sandbox for what containerd's own client has no word for, a
//! checkpoint in a folder that is named.

use std::path::Path;

use containerd_shim::Flags;
use containerd_shim_protos::api::CheckpointTaskRequest;
use containerd_shim_protos::shim_async::{Client, TaskClient};
use containerd_shim_protos::ttrpc::context::with_duration;

use crate::bootstrap::check_name;
use crate::error::{Error, Result, io};

/// How long a checkpoint may take: as long as its workload may need to be ready, and a disk to write.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(3900);

/// Asks for a checkpoint of a container's sandbox in `folder`, and waits until it is there.
pub fn checkpoint(flags: &Flags, folder: &str) -> Result<()> {
    check_name("namespace", &flags.namespace)?;
    check_name("id", &flags.id)?;
    if !Path::new(folder).is_absolute() {
        return Err(Error::Invalid(format!("{folder:?} is not an absolute path")));
    }
    let socket = containerd_shim::socket_address(&flags.address, &flags.namespace, &flags.id);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(io("start a thread"))?;
    runtime.block_on(async {
        let reached = Client::connect(&socket).await.map_err(|error| {
            Error::NotFound(format!(
                "the shim of {} in namespace {} of {} ({socket}: {error})",
                flags.id, flags.namespace, flags.address
            ))
        })?;
        let request = CheckpointTaskRequest {
            id: flags.id.clone(),
            path: folder.to_owned(),
            ..Default::default()
        };
        let asked = TaskClient::new(reached).checkpoint(with_duration(PATIENCE), &request).await;
        asked.map(drop).map_err(|error| Error::Unavailable(error.to_string()))
    })
}
