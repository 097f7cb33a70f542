//! Limits: those that the guest's kernel can keep.

use crate::guest::{Guest, parse_list};
use serde_json::{Map, Value};

/// Adapts `linux.resources`, or those of an update.
pub fn adapt_resources(
    resources: &mut Map<String, Value>,
    guest: &Guest,
    warnings: &mut Vec<String>,
) {
    // Not a limit of a control group here: see `devices`.
    resources.remove("devices");
    for (name, why) in
        [("network", "there is no such controller"), ("rdma", "the guest has no such device")]
    {
        if resources.remove(name).is_some_and(|value| !is_empty(&value)) {
            warnings.push(format!("resources.{name} was left out: {why}"));
        }
    }
    adapt_memory(resources, guest, warnings);
    adapt_cpu(resources, guest, warnings);
    adapt_block_io(resources, warnings);
    if let Some(Value::Array(limits)) = resources.get_mut("hugepageLimits") {
        limits.retain(|limit| {
            limit["pageSize"].as_str().is_some_and(|size| guest.huge_pages.contains(size))
        });
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Object(map) => map.values().all(is_empty),
        Value::Array(list) => list.is_empty(),
        _ => false,
    }
}

fn adapt_memory(resources: &mut Map<String, Value>, guest: &Guest, warnings: &mut Vec<String>) {
    let Some(Value::Object(memory)) = resources.get_mut("memory") else { return };
    // Of version 1 of control groups: without an effect, or always on.
    for name in ["kernel", "kernelTCP", "swappiness", "useHierarchy", "checkBeforeUpdate"] {
        memory.remove(name);
    }
    if memory.remove("disableOOMKiller") == Some(Value::Bool(true)) {
        warnings.push("memory.disableOOMKiller was left out: there is no such thing".into());
    }
    // The guest has no swap device: there is nothing to limit.
    let limited = memory.get("limit").is_some_and(Value::is_i64);
    if !guest.swap || !limited {
        memory.remove("swap");
    }
}

fn adapt_cpu(resources: &mut Map<String, Value>, guest: &Guest, warnings: &mut Vec<String>) {
    let Some(Value::Object(cpu)) = resources.get_mut("cpu") else { return };
    for name in ["realtimeRuntime", "realtimePeriod"] {
        if cpu.remove(name).is_some_and(|value| value != 0 && !value.is_null()) {
            warnings.push(format!("cpu.{name} was left out: the guest has no real-time groups"));
        }
    }
    // Zero is what is not set.
    for name in ["shares", "quota", "period"] {
        if cpu.get(name).is_some_and(|value| *value == 0) {
            cpu.remove(name);
        }
    }
    let cpus = cpu.get("cpus").and_then(Value::as_str).unwrap_or_default();
    let here = parse_list(cpus).is_some_and(|cpus| cpus.is_subset(&guest.cpus));
    if !here {
        warnings.push(format!("cpu.cpus '{cpus}' was left out: the guest has others"));
    }
    if !here || cpus.is_empty() {
        cpu.remove("cpus");
    }
    if cpu.get("mems").is_some_and(|mems| mems != "0") {
        cpu.remove("mems");
    }
}

/// Numbers of the host's devices may be those of others here.
fn adapt_block_io(resources: &mut Map<String, Value>, warnings: &mut Vec<String>) {
    let Some(Value::Object(io)) = resources.get_mut("blockIO") else { return };
    for (name, value) in std::mem::take(io) {
        match name.as_str() {
            "weight" | "leafWeight" if value != 0 && !value.is_null() => {
                warnings.push(format!("blockIO.{name} was left out: the guest does not weigh"));
            }
            _ if is_empty(&value) || value == 0 => {}
            _ => warnings.push(format!("blockIO.{name} was left out: it names the host's devices")),
        }
    }
    resources.remove("blockIO");
}
