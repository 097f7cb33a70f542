//! The PCI bus in ACPI: MCFG with the place of the configuration space, and the host bridge of the
//! DSDT with its resources, a device for each slot, and the method that tells the kernel what was
//! plugged (ACPI 6.5, sections 6.3 and 5.6.6).

use acpi_tables::Aml;
use acpi_tables::aml::{self, EISAName, Path, ResourceTemplate};
use acpi_tables::mcfg::MCFG;
use devices::pci::{SLOTS, hotplug, root};

use super::tables::{OEM, Ready, TABLE, bytes};
use crate::layout;

/// Kinds of notification to a device (ACPI 6.5, table 5.218).
const DEVICE_CHECK: u8 = 1;
const EJECT_REQUEST: u8 = 3;

/// The table that says where the configuration space is.
pub fn mcfg() -> MCFG {
    let mut table = MCFG::new(OEM, TABLE, 1);
    table.add_ecam(layout::PCI_ECAM, 0, 0, 0);
    table
}

fn slot_name(slot: u8) -> Path {
    format!("S{slot:03}").as_str().into()
}

/// The host bridge, as a device of `\_SB_`.
pub fn host_bridge() -> Vec<u8> {
    let content = [identity(), resources(), registers(), slots(), notifications()].concat();
    bytes(&aml::Device::new("PCI0".into(), vec![&Ready(content)]))
}

fn identity() -> Vec<u8> {
    let name = |name: &str, value: &dyn Aml| bytes(&aml::Name::new(name.into(), value));
    [
        name("_HID", &EISAName::new("PNP0A08")),
        name("_CID", &EISAName::new("PNP0A03")),
        name("_SEG", &aml::ZERO),
        name("_BBN", &aml::ZERO),
        name("_UID", &aml::ZERO),
        name("_CCA", &aml::ONE),
    ]
    .concat()
}

fn resources() -> Vec<u8> {
    let ports = root::CONFIG_PORT;
    let buses = aml::AddressSpace::new_bus_number(0_u16, 0_u16);
    let config = aml::IO::new(ports, ports, 1, root::CONFIG_PORTS as u8);
    let windows = aml::AddressSpace::new_memory(
        aml::AddressSpaceCacheable::NotCacheable,
        true,
        layout::PCI_WINDOWS as u32,
        (layout::PCI_WINDOWS_END - 1) as u32,
        None,
    );
    let template = ResourceTemplate::new(vec![&buses, &config, &windows]);
    bytes(&aml::Name::new("_CRS".into(), &template))
}

/// The hot-plug registers as fields.
fn registers() -> Vec<u8> {
    let region = aml::OpRegion::new(
        "HPRG".into(),
        aml::OpRegionSpace::SystemIO,
        &layout::HOTPLUG_PORT,
        &(hotplug::LEN as u8),
    );
    let fields = aml::Field::new(
        "HPRG".into(),
        aml::FieldAccessType::DWord,
        aml::FieldLockRule::NoLock,
        aml::FieldUpdateRule::WriteAsZeroes,
        vec![
            aml::FieldEntry::Named(*b"PUP_", 32),
            aml::FieldEntry::Named(*b"PDWN", 32),
            aml::FieldEntry::Named(*b"PEJ_", 32),
        ],
    );
    [bytes(&region), bytes(&fields)].concat()
}

/// A device for each slot, which the kernel can be notified of and can eject.
fn slots() -> Vec<u8> {
    (1..SLOTS).flat_map(slot).collect()
}

fn slot(slot: u8) -> Vec<u8> {
    let (register, bit) = (Path::new("PEJ_"), 1_u32 << slot);
    let let_go = aml::Store::new(&register, &bit);
    let eject = aml::Method::new("_EJ0".into(), 1, true, vec![&let_go]);
    bytes(&aml::Device::new(
        slot_name(slot),
        vec![
            &aml::Name::new("_SUN".into(), &slot),
            &aml::Name::new("_ADR".into(), &(u32::from(slot) << 16)),
            &eject,
        ],
    ))
}

/// The method that the event device calls: takes the bits and notifies the slots.
fn notifications() -> Vec<u8> {
    let up = bytes(&aml::Store::new(&aml::Local(0), &Path::new("PUP_")));
    let down = bytes(&aml::Store::new(&aml::Local(1), &Path::new("PDWN")));
    let tests = (1..SLOTS).flat_map(|slot| {
        let mask = 1_u32 << slot;
        [(aml::Local(0), DEVICE_CHECK), (aml::Local(1), EJECT_REQUEST)]
            .into_iter()
            .flat_map(move |(bits, kind)| {
                let chosen = aml::And::new(&aml::ZERO, &bits, &mask);
                let notify = bytes(&aml::Notify::new(&slot_name(slot), &kind));
                bytes(&aml::If::new(&chosen, vec![&Ready(notify)]))
            })
            .collect::<Vec<u8>>()
    });
    let body = [up, down, tests.collect()].concat();
    bytes(&aml::Method::new("PCNT".into(), 0, true, vec![&Ready(body)]))
}
