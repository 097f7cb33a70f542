//! The machine in ACPI: hardware-reduced (ACPI 6.5, section 4.1), so that the kernel has no legacy
//! power management, timer or interrupt controller to look for.
//!
//! FADT (sleep and reset registers), MADT (processors, I/O APIC), DSDT (virtio-mmio devices as
//! `LNRO0005`, the PCI bus, the serial port, the panic port, the generation id, the event device with
//! the power button, S5).

use acpi_tables::aml::{self, EISAName, Path, ResourceTemplate};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, AmlSink};
use devices::ids::Gsi;
use devices::memory::{Bytes, GuestAddress, Memory};

use super::pci_tables;
use crate::layout;

pub(super) const OEM: [u8; 6] = *b"CUBEVM";
pub(super) const TABLE: [u8; 8] = *b"CUBEMVMM";

/// A virtio-mmio device as the DSDT describes it.
#[derive(Clone, Copy, Debug)]
pub struct MmioDevice {
    /// Base address of its registers.
    pub base: u64,
    /// Its interrupt line.
    pub gsi: Gsi,
}

/// What the tables describe.
#[derive(Clone, Copy, Debug)]
pub struct Description<'a> {
    /// Number of vCPUs.
    pub cpus: u32,
    /// The virtio-mmio devices.
    pub virtio: &'a [MmioDevice],
    /// There is a PCI bus.
    pub pci: bool,
}

/// Why the tables could not be written.
#[derive(Debug, thiserror::Error)]
pub enum TablesError {
    /// They have outgrown their area.
    #[error("ACPI tables need {needed} bytes, there are {available}")]
    TooLarge {
        /// Bytes needed.
        needed: usize,
        /// Bytes there.
        available: u64,
    },
    /// Guest memory is not there.
    #[error("ACPI tables cannot be written to guest memory")]
    Memory(#[source] vm_memory::GuestMemoryError),
}

/// Writes all tables; gives the address of the root pointer.
pub fn write(memory: &Memory, machine: &Description<'_>) -> Result<u64, TablesError> {
    let mut area = vec![0; Rsdp::len().next_multiple_of(16)];
    let place = |area: &mut Vec<u8>, table: &[u8]| {
        area.resize(area.len().next_multiple_of(16), 0);
        let address = layout::ACPI + area.len() as u64;
        area.extend(table);
        address
    };
    let dsdt_address = place(&mut area, dsdt(machine).as_slice());
    let fadt_address = place(&mut area, &bytes(&fadt(dsdt_address)));
    let madt_address = place(&mut area, &bytes(&madt(machine.cpus)));
    let mut xsdt = XSDT::new(OEM, TABLE, 1);
    xsdt.add_entry(fadt_address);
    xsdt.add_entry(madt_address);
    if machine.pci {
        let mcfg_address = place(&mut area, &bytes(&pci_tables::mcfg()));
        xsdt.add_entry(mcfg_address);
    }
    let xsdt_address = place(&mut area, &bytes(&xsdt));
    let rsdp = bytes(&Rsdp::new(OEM, xsdt_address));
    area.splice(..rsdp.len(), rsdp);
    let available = layout::GENERATION - layout::ACPI;
    if area.len() as u64 > available {
        return Err(TablesError::TooLarge { needed: area.len(), available });
    }
    memory.write_slice(&area, GuestAddress(layout::ACPI)).map_err(TablesError::Memory)?;
    Ok(layout::ACPI)
}

struct Bytecode(Vec<u8>);

impl AmlSink for Bytecode {
    fn byte(&mut self, byte: u8) {
        self.0.push(byte);
    }
}

pub(super) fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut sink = Bytecode(Vec::new());
    table.to_aml_bytes(&mut sink);
    sink.0
}

fn port(address: u16) -> GAS {
    GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, u64::from(address))
}

fn fadt(dsdt: u64) -> acpi_tables::fadt::FADT {
    // No VGA, no CMOS clock, no keyboard controller to probe for (ACPI 6.5, table 5.11). There is a
    // clock at the CMOS ports, without its interrupt, for software that reads it unasked. Kernels
    // have kvm-clock, which is better, and the driver of one that is announced reads some twenty
    // registers and then gives up for want of the interrupt.
    const NO_VGA: u16 = 1 << 2;
    const NO_RTC: u16 = 1 << 5;
    let mut table = FADTBuilder::new(OEM, TABLE, 1)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton);
    table.iapc_boot_arch = (NO_VGA | NO_RTC).into();
    table.reset_reg = port(layout::RESET_PORT);
    table.reset_value = layout::RESET_VALUE;
    table.sleep_control_reg = port(layout::SLEEP_PORT);
    table.sleep_status_reg = port(layout::SLEEP_PORT + 1);
    table.hypervisor_vendor_identity = u64::from_le_bytes(*b"CubeVMM\0").into();
    table.finalize()
}

fn madt(cpus: u32) -> MADT {
    let local = LocalInterruptController::Address(layout::LOCAL_APIC);
    let mut table = MADT::new(OEM, TABLE, 1, local);
    for id in 0..cpus {
        let id = id as u8;
        table.add_structure(ProcessorLocalApic::new(id, id, EnabledStatus::Enabled));
    }
    table.add_structure(IoApic::new(0, layout::IO_APIC, 0));
    table
}

fn line(gsi: Gsi) -> aml::Interrupt {
    // Consumer, edge-triggered, active high, exclusive.
    aml::Interrupt::new(true, true, false, false, gsi.0)
}

fn ports(first: u16, count: u8) -> aml::IO {
    aml::IO::new(first, first, 1, count)
}

/// A device called `name` with hardware id `hid` and the given resources.
fn device(name: &str, hid: &dyn Aml, uid: u32, resources: Vec<&dyn Aml>) -> Vec<u8> {
    bytes(&aml::Device::new(
        name.into(),
        vec![
            &aml::Name::new("_HID".into(), hid),
            &aml::Name::new("_UID".into(), &uid),
            &aml::Name::new("_STA".into(), &0x0f_u8),
            &aml::Name::new("_CRS".into(), &ResourceTemplate::new(resources)),
        ],
    ))
}

fn virtio(index: usize, at: &MmioDevice) -> Vec<u8> {
    let registers =
        aml::Memory32Fixed::new(true, at.base as u32, devices::virtio::mmio::REGION_SIZE as u32);
    let name = format!("V{index:03}");
    bytes(&aml::Device::new(
        name.as_str().into(),
        vec![
            &aml::Name::new("_HID".into(), &"LNRO0005"),
            &aml::Name::new("_UID".into(), &(index as u32)),
            // DMA is coherent.
            &aml::Name::new("_CCA".into(), &aml::ONE),
            &aml::Name::new("_CRS".into(), &ResourceTemplate::new(vec![&registers, &line(at.gsi)])),
        ],
    ))
}

/// The power button.
fn button() -> Vec<u8> {
    let id = EISAName::new("PNP0C0C");
    bytes(&aml::Device::new("PWRB".into(), vec![&aml::Name::new("_HID".into(), &id)]))
}

/// The id of the machine's generation, and where it stands. Kernels know it by either of the
/// compatible names.
fn generation() -> Vec<u8> {
    let compatible = aml::Package::new(vec![&"VM_Gen_Counter", &"VMGENCTR"]);
    // Its address in two halves.
    let (low, high) = (layout::GENERATION as u32, (layout::GENERATION >> 32) as u32);
    let address = aml::Package::new(vec![&low, &high]);
    bytes(&aml::Device::new(
        "VGEN".into(),
        vec![
            &aml::Name::new("_HID".into(), &"CUBE0001"),
            &aml::Name::new("_CID".into(), &compatible),
            &aml::Name::new("_DDN".into(), &"VM_Gen_Counter"),
            &aml::Name::new("ADDR".into(), &address),
        ],
    ))
}

/// The event device: an interrupt for each thing that can happen, and what the kernel does then.
fn events(pci: bool) -> Vec<u8> {
    let notify = |device: &str| bytes(&aml::Notify::new(&Path::new(device), &0x80_u8));
    let mut events = vec![
        (layout::EVENT_GSI, notify("\\_SB_.PWRB")),
        (layout::GENERATION_GSI, notify("\\_SB_.VGEN")),
    ];
    if pci {
        let slots = aml::MethodCall::new("\\_SB_.PCI0.PCNT".into(), vec![]);
        events.push((layout::HOTPLUG_GSI, bytes(&slots)));
    }
    let lines: Vec<aml::Interrupt> = events.iter().map(|(gsi, _)| line(*gsi)).collect();
    let lines = lines.iter().map(|line| line as &dyn Aml).collect();
    let reactions: Vec<u8> = events
        .into_iter()
        .flat_map(|(gsi, reaction)| {
            let is_it = aml::Equal::new(&aml::Arg(0), &gsi.0);
            bytes(&aml::If::new(&is_it, vec![&Ready(reaction)]))
        })
        .collect();
    bytes(&aml::Device::new(
        "GED_".into(),
        vec![
            &aml::Name::new("_HID".into(), &"ACPI0013"),
            &aml::Name::new("_UID".into(), &aml::ZERO),
            &aml::Name::new("_CRS".into(), &ResourceTemplate::new(lines)),
            &aml::Method::new("_EVT".into(), 1, true, vec![&Ready(reactions)]),
        ],
    ))
}

/// Bytecode that is ready.
pub(super) struct Ready(pub(super) Vec<u8>);

impl Aml for Ready {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        sink.vec(&self.0);
    }
}

fn dsdt(machine: &Description<'_>) -> Sdt {
    let serial = device(
        "COM1",
        &EISAName::new("PNP0501"),
        0,
        vec![&ports(layout::SERIAL_PORT, 8), &line(layout::SERIAL_GSI)],
    );
    let panic = device("PEVT", &"QEMU0001", 0, vec![&ports(layout::PVPANIC_PORT, 1)]);
    let devices = machine.virtio.iter().enumerate();
    let virtio: Vec<u8> = devices.flat_map(|(index, at)| virtio(index, at)).collect();
    let bridge = if machine.pci { pci_tables::host_bridge() } else { Vec::new() };
    let content = Ready(
        [serial, panic, button(), generation(), bridge, events(machine.pci), virtio].concat(),
    );
    let scope = bytes(&aml::Scope::new("\\_SB_".into(), vec![&content]));
    // S5 is soft off; the value goes to the sleep control register.
    let sleep_type = devices::legacy::sleep::SLEEP_TYPE_S5;
    let off = bytes(&aml::Name::new("\\_S5_".into(), &aml::Package::new(vec![&sleep_type])));
    let mut table = Sdt::new(*b"DSDT", 36, 6, OEM, TABLE, 1);
    table.append_slice(&scope);
    table.append_slice(&off);
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(cpus: u32, devices: usize, pci: bool) -> Vec<u8> {
        let memory = crate::memory::fresh(32 << 20).unwrap();
        let devices: Vec<_> = (0..devices)
            .map(|index| MmioDevice {
                base: layout::virtio_mmio_base(index),
                gsi: layout::virtio_mmio_gsi(index),
            })
            .collect();
        let machine = Description { cpus, virtio: &devices, pci };
        assert_eq!(write(&memory, &machine).unwrap(), layout::ACPI);
        let mut area = vec![0; 0x2_0000];
        memory.read_slice(&mut area, GuestAddress(layout::ACPI)).unwrap();
        area
    }

    fn table<'a>(area: &'a [u8], signature: &[u8]) -> &'a [u8] {
        let start = area.windows(4).position(|window| window == signature).unwrap();
        let len = u32::from_le_bytes(area[start + 4..start + 8].try_into().unwrap()) as usize;
        &area[start..start + len]
    }

    #[test]
    fn every_table_has_a_valid_checksum() {
        let area = written(4, 3, true);
        for signature in [b"DSDT", b"FACP", b"APIC", b"MCFG", b"XSDT"] {
            let sum = table(&area, signature).iter().fold(0_u8, |a, b| a.wrapping_add(*b));
            assert_eq!(sum, 0, "{signature:?}");
        }
        assert_eq!(area[..20].iter().fold(0_u8, |a, b| a.wrapping_add(*b)), 0);
    }

    #[test]
    fn the_generation_id_has_a_page_of_its_own_and_is_described() {
        const { assert!(layout::GENERATION >= layout::ACPI && layout::GENERATION.is_multiple_of(4096)) };
        for pci in [false, true] {
            let area = written(1, 1, pci);
            assert_eq!(area[(layout::GENERATION - layout::ACPI) as usize..], [0; 4096]);
            let dsdt = table(&area, b"DSDT");
            // A package of two: the lower half of the address, and zero.
            let mut address = b"ADDR\x12\x08\x02\x0c".to_vec();
            address.extend((layout::GENERATION as u32).to_le_bytes());
            address.push(0);
            assert!(dsdt.windows(address.len()).any(|window| window == address));
            // An edge-triggered line of its own for the event device.
            let line = [0x89, 6, 0, 0x03, 1, layout::GENERATION_GSI.0 as u8, 0, 0, 0];
            assert_eq!(dsdt.windows(line.len()).filter(|window| *window == line).count(), 1);
        }
    }

    #[test]
    fn the_largest_machine_fits() {
        let area = written(layout::MAX_CPUS, layout::MAX_VIRTIO_MMIO, true);
        assert_eq!(table(&area, b"APIC").len(), 44 + 32 * 8 + 12);
    }
}
