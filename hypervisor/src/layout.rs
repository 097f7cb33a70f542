//! The guest's physical address map and interrupt lines. Everything with a fixed address stands here.
//!
//! ```text
//! 0x0000_0000 ┌──────────────────────────────┐
//!             │ low RAM: boot structures     │ GDT, start info, page tables, command line: see below
//! 0x000a_0000 ├──────────────────────────────┤
//!             │ hole (no VGA, no option ROM) │
//! 0x000e_0000 ├──────────────────────────────┤
//!             │ ACPI tables (in RAM, e820    │
//!             │ reserved)                    │
//! 0x0010_0000 ├──────────────────────────────┤
//!             │ RAM: kernel … initrd at top  │
//! 0xc000_0000 ├──────────────────────────────┤ 3 GiB: end of low RAM at the latest
//!             │ 0xc000_0000 PCI windows      │ 64 KiB each
//!             │ 0xd000_0000 virtio-mmio      │ 4 KiB each
//!             │ 0xe000_0000 PCI ECAM         │ 1 MiB, bus 0
//!             │ 0xfec0_0000 I/O APIC         │
//!             │ 0xfee0_0000 local APICs      │
//!             │ 0xfffb_c000 KVM's own pages  │ identity map, TSS
//! 0x1_0000_0000├─────────────────────────────┤ 4 GiB
//!             │ the rest of RAM              │
//!             └──────────────────────────────┘
//! ```

use devices::ids::Gsi;

/// Global descriptor table for the entry modes.
pub const GDT: u64 = 0x500;
/// PVH `hvm_start_info`, followed by its module list and memory map.
pub const PVH_START_INFO: u64 = 0x6000;
/// Linux `boot_params` ("zero page").
pub const BOOT_PARAMS: u64 = 0x7000;
/// Stack for kernels that push before they set up their own; grows down.
pub const BOOT_STACK: u64 = 0x8ff0;
/// Page tables that map the first 4 GiB one to one: PML4, PDPT, then four page directories.
pub const PAGE_TABLES: u64 = 0x9000;
/// Instructions that stamp the boot ladder before the kernel's first one, when tracing.
pub const STAMP_CODE: u64 = 0x1_0000;
/// Kernel command line.
pub const CMDLINE: u64 = 0x2_0000;
/// Bytes for the command line, with its terminating NUL. Linux on x86 takes 2048.
pub const CMDLINE_MAX: usize = 2048;
/// End of the conventional memory that the e820 map gives to the kernel.
pub const LOW_RAM_END: u64 = 0x9_fc00;
/// ACPI tables, RSDP first.
pub const ACPI: u64 = 0xe_0000;
/// The id of the machine's generation, alone in the last page of the ACPI area.
pub const GENERATION: u64 = ACPI_END - 0x1000;
/// End of the ACPI area.
pub const ACPI_END: u64 = 0x10_0000;
/// Where RAM above the first megabyte starts.
pub const HIGH_RAM: u64 = 0x10_0000;

/// The hole for devices below 4 GiB.
pub const DEVICE_HOLE: u64 = 0xc000_0000;
/// End of that hole.
pub const DEVICE_HOLE_END: u64 = 0x1_0000_0000;
/// Where the windows of PCI functions are, and may be moved to.
pub const PCI_WINDOWS: u64 = 0xc000_0000;
/// End of that area.
pub const PCI_WINDOWS_END: u64 = 0xd000_0000;
/// Configuration space of PCI bus 0.
pub const PCI_ECAM: u64 = 0xe000_0000;
/// First virtio-mmio device.
pub const VIRTIO_MMIO: u64 = 0xd000_0000;
/// I/O APIC registers, in the kernel.
pub const IO_APIC: u32 = 0xfec0_0000;
/// Local APIC registers, in the kernel.
pub const LOCAL_APIC: u32 = 0xfee0_0000;
/// Page for KVM's identity map on processors without unrestricted guests.
pub const KVM_IDENTITY_MAP: u64 = 0xfffb_c000;
/// Three pages for KVM's TSS, same reason.
pub const KVM_TSS: u64 = 0xfffb_d000;

/// COM1.
pub const SERIAL_PORT: u16 = devices::legacy::serial::COM1_PORT;
/// i8042: reset only.
pub const I8042_PORT: u16 = devices::legacy::i8042::PORT;
/// Command register of the i8042, where ACPI says reset is.
pub const RESET_PORT: u16 = 0x64;
/// The command that resets.
pub const RESET_VALUE: u8 = 0xfe;
/// Panic notification.
pub const PVPANIC_PORT: u16 = devices::legacy::pvpanic::PORT;
/// CMOS clock.
pub const RTC_PORT: u16 = devices::legacy::rtc::PORT;
/// ACPI sleep control register; the status register follows.
pub const SLEEP_PORT: u16 = 0x600;

/// Registers of the PCI slots that have changed.
pub const HOTPLUG_PORT: u16 = 0x620;

/// COM1's line.
pub const SERIAL_GSI: Gsi = devices::legacy::serial::COM1_GSI;
/// ACPI generic event device: the machine is of another generation. The line of a second serial
/// port, which there is not.
pub const GENERATION_GSI: Gsi = Gsi(3);
/// ACPI generic event device: power button.
pub const EVENT_GSI: Gsi = Gsi(5);
/// ACPI generic event device: PCI slots have changed. On a machine with PCI, where no virtio-mmio
/// device needs the line.
pub const HOTPLUG_GSI: Gsi = Gsi(6);
/// First line for virtio-mmio devices.
pub const VIRTIO_GSI: Gsi = Gsi(6);
/// Lines of the I/O APIC.
pub const GSI_COUNT: u32 = 24;

/// Most virtio-mmio devices: one line each.
pub const MAX_VIRTIO_MMIO: usize = (GSI_COUNT - VIRTIO_GSI.0) as usize;
/// Most vCPUs.
pub const MAX_CPUS: u32 = 32;

/// RAM as `(guest address, bytes)`, leaving out the device hole.
pub fn ram_regions(bytes: u64) -> Vec<(u64, u64)> {
    if bytes <= DEVICE_HOLE {
        return vec![(0, bytes)];
    }
    vec![(0, DEVICE_HOLE), (DEVICE_HOLE_END, bytes - DEVICE_HOLE)]
}

/// First address above `ram` bytes of RAM and the device hole, on a boundary of 1 GiB.
pub fn above_ram(ram: u64) -> u64 {
    let ends = ram_regions(ram).into_iter().map(|(start, len)| start + len);
    ends.max().unwrap_or(0).max(DEVICE_HOLE_END).next_multiple_of(1 << 30)
}

/// Base address of the n-th virtio-mmio device.
pub fn virtio_mmio_base(index: usize) -> u64 {
    VIRTIO_MMIO + index as u64 * devices::virtio::mmio::REGION_SIZE
}

/// Where the window of the n-th PCI function is at first.
pub fn pci_window(index: usize) -> u64 {
    PCI_WINDOWS + index as u64 * devices::virtio::pci::WINDOW_SIZE
}

/// Interrupt line of the n-th virtio-mmio device.
pub fn virtio_mmio_gsi(index: usize) -> Gsi {
    Gsi(VIRTIO_GSI.0 + index as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ram_leaves_out_the_device_hole() {
        assert_eq!(ram_regions(1 << 30), [(0, 1 << 30)]);
        assert_eq!(ram_regions(3 << 30), [(0, 3 << 30)]);
        assert_eq!(ram_regions(4 << 30), [(0, 3 << 30), (4 << 30, 1 << 30)]);
    }

    #[test]
    fn pci_windows_stay_in_their_area() {
        assert!(pci_window(usize::from(devices::pci::SLOTS)) <= PCI_WINDOWS_END);
    }

    #[test]
    fn persistent_memory_is_above_ram_and_hole() {
        assert_eq!(above_ram(256 << 20), 4 << 30);
        assert_eq!(above_ram(4 << 30), 5 << 30);
        assert_eq!(above_ram((4 << 30) + 4096), 6 << 30);
    }

    #[test]
    fn virtio_devices_stay_below_the_io_apic() {
        assert!(virtio_mmio_base(MAX_VIRTIO_MMIO) < u64::from(IO_APIC));
        assert!(virtio_mmio_gsi(MAX_VIRTIO_MMIO - 1).0 < GSI_COUNT);
    }
}
