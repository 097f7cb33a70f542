//! What a container uses, in the form that containerd and CRI read: `io.containerd.cgroups.v2`.

use containerd_shim_protos::cgroups_v2::metrics::{
    CPUStat, MemoryEvents, MemoryStat, Metrics, PidsStat,
};
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::protobuf::{Message, MessageField, MessageFull};
use serde_json::Value;

use crate::container::Container;
use crate::error::{Error, Result};
use crate::oci;
use crate::sandbox::Sandbox;

/// Asks the guest, unless it stands still or is gone: then there is nothing to count.
pub async fn of(sandbox: &Sandbox, container: &Container) -> Result<Any> {
    let _quiet = sandbox.quiet.read().await;
    let counts = match sandbox.vm() {
        Ok(vm) if !container.is_paused() && container.init.end().is_none() => {
            oci::stats(&vm.guest, &container.inside).await?
        }
        _ => Value::Null,
    };
    let metrics = metrics(&counts);
    Ok(Any {
        type_url: Metrics::descriptor().full_name().to_owned(),
        value: metrics.write_to_bytes().map_err(|error| Error::Invalid(error.to_string()))?,
        ..Default::default()
    })
}

fn metrics(counts: &Value) -> Metrics {
    let number = |path: &str| counts.pointer(path).and_then(Value::as_u64).unwrap_or_default();
    Metrics {
        pids: MessageField::some(PidsStat {
            current: number("/pids/current"),
            limit: number("/pids/limit"),
            ..Default::default()
        }),
        cpu: MessageField::some(CPUStat {
            usage_usec: number("/cpu/usage_usec"),
            user_usec: number("/cpu/user_usec"),
            system_usec: number("/cpu/system_usec"),
            nr_periods: number("/cpu/nr_periods"),
            nr_throttled: number("/cpu/nr_throttled"),
            throttled_usec: number("/cpu/throttled_usec"),
            ..Default::default()
        }),
        memory: MessageField::some(MemoryStat {
            usage: number("/memory/usage"),
            usage_limit: number("/memory/limit"),
            inactive_file: number("/memory/inactive_file"),
            ..Default::default()
        }),
        memory_events: MessageField::some(MemoryEvents {
            oom: number("/memory/events/oom"),
            oom_kill: number("/memory/events/oom_kill"),
            ..Default::default()
        }),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_the_guest_counts_is_what_containerd_reads() {
        let counts = json!({
            "memory": {"usage": 4096, "inactive_file": 1024, "events": {"oom_kill": 1}},
            "cpu": {"usage_usec": 7},
        });
        let metrics = metrics(&counts);
        assert_eq!((metrics.memory.usage, metrics.memory.inactive_file), (4096, 1024));
        assert_eq!(metrics.memory_events.oom_kill, 1);
        assert_eq!(metrics.cpu.usage_usec, 7);
        assert_eq!(metrics.pids.current, 0);
    }
}
