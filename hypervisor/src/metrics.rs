//! What a VM counts: gathered from its parts, and written for programs that read it.
//!
//! Each part tells its numbers itself ([`devices::metrics`]); here they get the name of the product
//! and a label that says whose they are. Numbers of the same name are one [`Family`].

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::PoisonError;

use devices::ids::DeviceId;
use devices::metrics::{Kind, Meter, Metric};
use serde::{Deserialize, Serialize};

use crate::vm::SharedTransport;

/// In front of every name.
const PREFIX: &str = "cubevmm_";

/// How the numbers of a family behave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FamilyKind {
    /// They only grow.
    Counter,
    /// They go up and down.
    Gauge,
}

/// Numbers of one name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Family {
    /// As in `cubevmm_net_received_bytes_total`.
    pub name: String,
    /// How they behave.
    pub kind: FamilyKind,
    /// What they mean.
    pub help: String,
    /// One per part that tells this number.
    pub samples: Vec<Sample>,
}

/// A number and whose it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// For example `device` and the name of the device.
    pub labels: BTreeMap<String, String>,
    /// The number.
    pub value: u64,
}

/// Numbers on their way to a reader.
#[derive(Debug, Default)]
pub struct Gathering(BTreeMap<&'static str, (Metric, Vec<Sample>)>);

impl Gathering {
    /// Takes in what `meter` tells, labelled with `key` and `value`.
    pub fn add(&mut self, key: &str, value: &str, meter: &Meter) {
        let labels = BTreeMap::from([(key.to_owned(), value.to_owned())]);
        for metric in meter.metrics() {
            let (_, samples) = self.0.entry(metric.name).or_insert((metric, Vec::new()));
            samples.push(Sample { labels: labels.clone(), value: metric.value });
        }
    }

    /// Takes in what virtio devices tell. Waits for a register access that is under way.
    pub fn add_devices(&mut self, devices: &[(DeviceId, SharedTransport)]) {
        for (id, transport) in devices {
            let mut transport = transport.lock().unwrap_or_else(PoisonError::into_inner);
            let meter = transport.lifecycle().meter();
            drop(transport);
            if let Some(meter) = meter {
                self.add("device", id.as_str(), &meter);
            }
        }
    }

    /// All families, by name.
    pub fn families(self) -> Vec<Family> {
        let family = |(first, samples): (Metric, Vec<Sample>)| Family {
            name: format!("{PREFIX}{}", first.name),
            kind: match first.kind {
                Kind::Counter => FamilyKind::Counter,
                Kind::Gauge => FamilyKind::Gauge,
            },
            help: first.help.to_owned(),
            samples,
        };
        self.0.into_values().map(family).collect()
    }
}

/// In the text format of Prometheus, version 0.0.4.
pub fn prometheus(families: &[Family]) -> String {
    let mut text = String::new();
    for family in families {
        let name = &family.name;
        let kind = match family.kind {
            FamilyKind::Counter => "counter",
            FamilyKind::Gauge => "gauge",
        };
        let help = escaped(&family.help, false);
        // Writing to a string does not fail.
        let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
        for sample in &family.samples {
            let labels: Vec<String> = sample
                .labels
                .iter()
                .map(|(key, value)| format!("{key}=\"{}\"", escaped(value, true)))
                .collect();
            let _ = writeln!(text, "{name}{{{}}} {}", labels.join(","), sample.value);
        }
    }
    text
}

/// With what the format gives a meaning escaped; in labels that is the quotation mark, too.
fn escaped(text: &str, quotes: bool) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\\' => escaped.push_str("\\\\"),
            '\n' => escaped.push_str("\\n"),
            '"' if quotes => escaped.push_str("\\\""),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use devices::executor::Executor;
    use devices::metrics::{Count, Metered};
    use devices::virtio::pmem::PmemBacking;

    use super::*;
    use crate::builder::Observers;
    use crate::config::{TransportKind, VmConfig};
    use crate::console::{ConsoleLog, ConsoleSink};
    use crate::event::Events;
    use crate::trace::Ladder;
    use crate::wiring::{LateHandle, Wiring, place_pmem};

    struct Part(Count);

    impl Metered for Part {
        fn metrics(&self) -> Vec<Metric> {
            vec![
                Metric::counter("part_things_total", "Things: a \\ and\na line", self.0.get()),
                Metric::gauge("part_now", "Things now", 1),
            ]
        }
    }

    fn part(count: u64) -> Meter {
        let part = Part(Count::new());
        part.0.add(count);
        Arc::new(part)
    }

    #[test]
    fn numbers_of_one_name_stand_together_and_are_escaped() {
        let mut gathering = Gathering::default();
        gathering.add("device", "a\"b\\c\nd", &part(7));
        gathering.add("device", "plain", &part(u64::MAX));
        let text = prometheus(&gathering.families());
        let expected = "\
# HELP cubevmm_part_now Things now
# TYPE cubevmm_part_now gauge
cubevmm_part_now{device=\"a\\\"b\\\\c\\nd\"} 1
cubevmm_part_now{device=\"plain\"} 1
# HELP cubevmm_part_things_total Things: a \\\\ and\\na line
# TYPE cubevmm_part_things_total counter
cubevmm_part_things_total{device=\"a\\\"b\\\\c\\nd\"} 7
cubevmm_part_things_total{device=\"plain\"} 18446744073709551615
";
        assert_eq!(text, expected);
    }

    /// Everything that a machine can have without a host's network, on both transports.
    fn whole_machine(transport: TransportKind) -> (Vec<String>, Vec<Family>) {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 21).unwrap();
        let config = format!(
            r#"{{"cpus":1,"memory":"64M","kernel":"k","balloon":true,"console":"virtio",
                "transport":{}}}"#,
            serde_json::to_string(&transport).unwrap()
        );
        let config: VmConfig = serde_json::from_str(&config).unwrap();
        let memory = crate::memory::fresh(64 << 20).unwrap();
        let executor = Executor::spawn("test").unwrap();
        let (events, _receiver) = Events::channel();
        let (ladder, console) = (Ladder::start(), ConsoleSink::default());
        let observers = Observers { ladder, stamp_entry: false, events, console };
        let late = LateHandle::default();
        let mut wiring =
            Wiring::new(&config, &memory, executor.handle(), late, &observers.events).unwrap();
        let log = ConsoleLog::new().with_virtio().unwrap();
        wiring.legacy_devices(&observers, log.clone()).unwrap();
        let _vsock = wiring.virtio_devices(&config, Vec::new()).unwrap();
        wiring.console(&config, &log).unwrap();
        wiring.balloon(&config).unwrap();
        let backing = PmemBacking::open(file.path(), true).unwrap();
        let placed = place_pmem(&config, vec![(DeviceId::new("data"), backing)]);
        wiring.pmem(&placed).unwrap();
        let mut gathering = Gathering::default();
        gathering.add_devices(&wiring.transports);
        for (kind, name, meter) in &wiring.meters {
            gathering.add(kind, name, meter);
        }
        let names = wiring.transports.iter().map(|(id, _)| id.to_string()).collect();
        (names, gathering.families())
    }

    #[test]
    fn every_device_tells_what_it_counts() {
        for transport in [TransportKind::Mmio, TransportKind::Pci] {
            let (mut devices, families) = whole_machine(transport);
            assert_eq!(devices.len(), 5, "{devices:?}");
            devices.extend(["serial", "ports", "memory", "console-log"].map(str::to_owned));
            let samples = || families.iter().flat_map(|family| &family.samples);
            for device in devices {
                assert!(
                    samples().any(|sample| sample.labels.values().eq([&device])),
                    "{device} tells nothing"
                );
            }
            assert!(families.iter().all(|family| family.samples.iter().all(|s| s.value == 0)));
            assert!(families.iter().all(|family| family.name.starts_with("cubevmm_")));
        }
    }

    #[test]
    fn families_survive_json() {
        let mut gathering = Gathering::default();
        gathering.add("device", "net0", &part(u64::MAX));
        let families = gathering.families();
        let json = serde_json::to_string(&families).unwrap();
        assert!(json.contains("\"kind\":\"counter\""), "{json}");
        assert_eq!(serde_json::from_str::<Vec<Family>>(&json).unwrap(), families);
    }
}
