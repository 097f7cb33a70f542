//! Device files, and which of them may be used. Numbers of devices are the host's: those of block
//! devices mean others here, or none, so they are looked up by path.

use crate::guest::{Device, Guest};
use serde_json::{Map, Value, json};

/// A rule about the use of devices; `None` is any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceRule {
    /// Whether it grants.
    pub allow: bool,
    /// `c`, `b`, or both.
    pub kind: Option<char>,
    /// The major number.
    pub major: Option<u32>,
    /// The minor number.
    pub minor: Option<u32>,
    /// Some of `r`, `w` and `m`, for the making of a device file.
    pub access: String,
}

/// What every container may use, runtime-spec config-linux.md "Default Devices", and terminals.
const DEFAULT: [(u32, Option<u32>); 8] = [
    (1, Some(3)),
    (1, Some(5)),
    (1, Some(7)),
    (1, Some(8)),
    (1, Some(9)),
    (5, Some(0)),
    (5, Some(2)),
    (136, None),
];

/// Rewrites `linux.devices`, and makes the rules of `resources.devices`.
pub fn adapt(
    linux: &mut Map<String, Value>,
    guest: &Guest,
    warnings: &mut Vec<String>,
) -> Vec<DeviceRule> {
    // What the host's numbers are here.
    let mut known: Vec<(Device, Device)> = Vec::new();
    if let Some(Value::Array(devices)) = linux.get_mut("devices") {
        devices.retain_mut(|device| {
            let path = device["path"].as_str().unwrap_or_default().to_owned();
            if device["type"] == "p" {
                return true;
            }
            let Some(here) = guest.devices.get(&path) else {
                warnings.push(format!("the device '{path}' was left out: the guest has none"));
                return false;
            };
            if let Some(there) = numbers(device) {
                known.push((there, *here));
            }
            device["type"] = json!(here.kind.to_string());
            device["major"] = json!(here.major);
            device["minor"] = json!(here.minor);
            true
        });
    }
    let rules = linux.get("resources").and_then(|resources| resources.get("devices"));
    let rules = rules.and_then(Value::as_array).into_iter().flatten();
    let mut adapted: Vec<_> = rules.filter_map(|rule| adapt_rule(rule, &known)).collect();
    let default = |(major, minor): (u32, Option<u32>)| DeviceRule {
        allow: true,
        kind: Some('c'),
        major: Some(major),
        minor,
        access: "rwm".into(),
    };
    adapted.extend(DEFAULT.into_iter().map(default));
    adapted
}

fn numbers(device: &Value) -> Option<Device> {
    // An unbuffered character device is one.
    let kind = match device["type"].as_str()? {
        "b" => 'b',
        "c" | "u" => 'c',
        _ => return None,
    };
    Some(Device { kind, major: device["major"].as_i64()?, minor: device["minor"].as_i64()? })
}

/// `None` for a grant of a device that is not known to be here.
fn adapt_rule(rule: &Value, known: &[(Device, Device)]) -> Option<DeviceRule> {
    let number = |name: &str| rule[name].as_i64().and_then(|number| u32::try_from(number).ok());
    let kind = match rule["type"].as_str() {
        Some("b") => Some('b'),
        Some("c" | "u") => Some('c'),
        _ => None,
    };
    let mut adapted = DeviceRule {
        allow: rule["allow"].as_bool().unwrap_or(false),
        kind,
        major: number("major"),
        minor: number("minor"),
        access: rule["access"].as_str().filter(|access| !access.is_empty()).unwrap_or("rwm").into(),
    };
    if let Some(there) = numbers(rule)
        && let Some((_, here)) = known.iter().find(|(host, _)| *host == there)
    {
        adapted.kind = Some(here.kind);
        adapted.major = u32::try_from(here.major).ok();
        adapted.minor = u32::try_from(here.minor).ok();
    } else if adapted.allow && kind != Some('c') && adapted.major.is_some() {
        return None;
    }
    Some(adapted)
}
