//! What the kernel reads at its entry: command line, memory map, and boot_params (Linux boot
//! protocol, Documentation/arch/x86/boot.rst) or hvm_start_info (PVH, xen/public/arch-x86/hvm).

use devices::memory::{Bytes, GuestAddress, Memory};
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use linux_loader::loader::elf::start_info::{
    hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use vm_memory::ByteValued;

use super::entry::Entry;
use super::kernel::LoadedKernel;
use crate::layout;

const RAM: u32 = 1;
const RESERVED: u32 = 2;

/// One range of the memory map: address, bytes, type.
type Range = (u64, u64, u32);

/// The memory map of a guest with `ram` bytes.
fn memory_map(ram: u64) -> Vec<Range> {
    let mut map = vec![
        (0, layout::LOW_RAM_END, RAM),
        (layout::ACPI, layout::ACPI_END - layout::ACPI, RESERVED),
        // Linux uses ECAM only where the memory map keeps it clear of RAM and BARs.
        (layout::PCI_ECAM, devices::pci::root::ECAM_SIZE, RESERVED),
    ];
    for (start, len) in layout::ram_regions(ram) {
        let start_above = start.max(layout::HIGH_RAM);
        map.push((start_above, start + len - start_above, RAM));
    }
    map
}

/// What is passed to the kernel.
#[derive(Debug)]
pub struct BootInfo<'a> {
    /// The command line, shorter than [`layout::CMDLINE_MAX`].
    pub cmdline: &'a str,
    /// Address and length of the initrd.
    pub initrd: Option<(u64, u64)>,
    /// Address of the ACPI root pointer.
    pub rsdp: u64,
    /// Bytes of RAM.
    pub ram: u64,
}

type Result = std::result::Result<(), vm_memory::GuestMemoryError>;

impl BootInfo<'_> {
    /// Writes all of it where the kernel's entry protocol says.
    pub fn write(&self, memory: &Memory, kernel: &LoadedKernel) -> Result {
        memory.write_slice(self.cmdline.as_bytes(), GuestAddress(layout::CMDLINE))?;
        match kernel.entry {
            Entry::Linux64(_) => self.write_boot_params(memory, kernel),
            Entry::Pvh(_) => self.write_start_info(memory),
        }
    }

    fn write_boot_params(&self, memory: &Memory, kernel: &LoadedKernel) -> Result {
        let mut params = boot_params { acpi_rsdp_addr: self.rsdp, ..Default::default() };
        params.hdr = kernel.setup_header.unwrap_or_default();
        params.hdr.boot_flag = 0xaa55;
        params.hdr.header = u32::from_le_bytes(*b"HdrS");
        // A loader without an assigned number.
        params.hdr.type_of_loader = 0xff;
        params.hdr.cmd_line_ptr = layout::CMDLINE as u32;
        params.hdr.cmdline_size = self.cmdline.len() as u32;
        if let Some((address, len)) = self.initrd {
            params.hdr.ramdisk_image = address as u32;
            params.hdr.ramdisk_size = len as u32;
        }
        let map = memory_map(self.ram);
        params.e820_entries = map.len() as u8;
        let mut table = params.e820_table;
        for (entry, (addr, size, type_)) in table.iter_mut().zip(map) {
            *entry = boot_e820_entry { addr, size, r#type: type_ };
        }
        params.e820_table = table;
        memory.write_slice(params.as_slice(), GuestAddress(layout::BOOT_PARAMS))
    }

    fn write_start_info(&self, memory: &Memory) -> Result {
        const MAGIC: u32 = 0x336e_c578;
        let modules = layout::PVH_START_INFO + size_of::<hvm_start_info>() as u64;
        let map_address = modules + size_of::<hvm_modlist_entry>() as u64;
        let map = memory_map(self.ram);
        let info = hvm_start_info {
            magic: MAGIC,
            version: 1,
            flags: 0,
            nr_modules: u32::from(self.initrd.is_some()),
            modlist_paddr: modules,
            cmdline_paddr: layout::CMDLINE,
            rsdp_paddr: self.rsdp,
            memmap_paddr: map_address,
            memmap_entries: map.len() as u32,
            ..Default::default()
        };
        memory.write_slice(info.as_slice(), GuestAddress(layout::PVH_START_INFO))?;
        if let Some((paddr, size)) = self.initrd {
            let module = hvm_modlist_entry { paddr, size, ..Default::default() };
            memory.write_slice(module.as_slice(), GuestAddress(modules))?;
        }
        let mut address = map_address;
        for (addr, size, type_) in map {
            let entry = hvm_memmap_table_entry { addr, size, type_, ..Default::default() };
            memory.write_slice(entry.as_slice(), GuestAddress(address))?;
            address += size_of::<hvm_memmap_table_entry>() as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_map_leaves_out_what_is_not_ram() {
        let map = memory_map(4 << 30);
        let ram: Vec<_> = map.iter().filter(|range| range.2 == RAM).collect();
        assert_eq!(
            ram,
            [
                &(0, 0x9_fc00, RAM),
                &(0x10_0000, 0xbff0_0000, RAM),
                &(0x1_0000_0000, 0x4000_0000, RAM)
            ]
        );
    }

    #[test]
    fn boot_structures_do_not_overlap() {
        let start_info_end = layout::PVH_START_INFO
            + (size_of::<hvm_start_info>()
                + size_of::<hvm_modlist_entry>()
                + 8 * size_of::<hvm_memmap_table_entry>()) as u64;
        assert!(start_info_end <= layout::BOOT_PARAMS);
        assert!(layout::BOOT_PARAMS + size_of::<boot_params>() as u64 <= layout::BOOT_STACK);
        const { assert!(layout::PAGE_TABLES + 6 * 0x1000 <= layout::STAMP_CODE) };
        assert!(layout::CMDLINE + layout::CMDLINE_MAX as u64 <= layout::LOW_RAM_END);
    }
}
