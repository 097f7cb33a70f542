//! The state of the boot processor at the kernel's first instruction.
//!
//! Two ways in: the 64-bit entry of the Linux boot protocol (long mode, paging on, one-to-one map,
//! RSI at boot_params) and PVH (32-bit protected mode, paging off, EBX at the start info). The other
//! processors wait for INIT and SIPI and need nothing.

use devices::memory::{Bytes, GuestAddress, Memory};
use kvm_bindings::{kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs};

use crate::layout;

/// Where and how a kernel is entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// 64-bit Linux boot protocol, at this address.
    Linux64(u64),
    /// PVH, at this address.
    Pvh(u32),
}

/// Value that the stamp code writes to the debug port: the guest has reached the kernel's entry.
pub const ENTRY_STAMP: u8 = 0x50;

type Result<T> = std::result::Result<T, vm_memory::GuestMemoryError>;

impl Entry {
    /// With tracing: puts a few instructions before the kernel that write [`ENTRY_STAMP`] to the
    /// debug port and jump to the real entry. Gives the entry to use.
    pub fn stamped(self, memory: &Memory) -> Result<Self> {
        let port = guest_protocol::DEBUG_PORT.to_le_bytes()[0];
        // mov al, stamp; out port, al
        let mut code = vec![0xb0, ENTRY_STAMP, 0xe6, port];
        let entry = match self {
            Entry::Linux64(address) => {
                // movabs rax, address; jmp rax
                code.extend([0x48, 0xb8]);
                code.extend(address.to_le_bytes());
                Entry::Linux64(layout::STAMP_CODE)
            }
            Entry::Pvh(address) => {
                // mov eax, address; jmp eax
                code.push(0xb8);
                code.extend(address.to_le_bytes());
                Entry::Pvh(layout::STAMP_CODE as u32)
            }
        };
        code.extend([0xff, 0xe0]);
        memory.write_slice(&code, GuestAddress(layout::STAMP_CODE))?;
        Ok(entry)
    }

    /// General registers.
    pub fn registers(self) -> kvm_regs {
        match self {
            Entry::Linux64(rip) => kvm_regs {
                rflags: 2,
                rip,
                rsp: layout::BOOT_STACK,
                rbp: layout::BOOT_STACK,
                rsi: layout::BOOT_PARAMS,
                ..Default::default()
            },
            Entry::Pvh(rip) => kvm_regs {
                rflags: 2,
                rip: u64::from(rip),
                rbx: layout::PVH_START_INFO,
                ..Default::default()
            },
        }
    }

    /// Writes the descriptor and page tables that `sregs` then points to.
    pub fn system_registers(self, memory: &Memory, sregs: &mut kvm_sregs) -> Result<()> {
        let long_mode = matches!(self, Entry::Linux64(_));
        let code = segment(1, 0xb, long_mode);
        let data = segment(2, 0x3, false);
        let task = task_segment(3);
        write_gdt(memory, &[code, data, task])?;
        sregs.gdt.base = layout::GDT;
        sregs.gdt.limit = 4 * 8 - 1;
        sregs.idt.base = 0;
        sregs.idt.limit = 0;
        sregs.cs = code;
        sregs.ds = data;
        sregs.es = data;
        sregs.fs = data;
        sregs.gs = data;
        sregs.ss = data;
        sregs.tr = task;
        // Protected mode, with the FPU's type bit that every processor has set.
        sregs.cr0 = CR0_PE | CR0_ET;
        sregs.cr4 = 0;
        sregs.efer = 0;
        if long_mode {
            write_page_tables(memory)?;
            sregs.cr3 = layout::PAGE_TABLES;
            sregs.cr4 = CR4_PAE;
            sregs.cr0 |= CR0_PG;
            sregs.efer = EFER_LME | EFER_LMA;
        }
        Ok(())
    }
}

const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;

/// A flat ring-0 segment of 4 GiB at GDT slot `index`.
fn segment(index: u16, type_: u8, long: bool) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector: index * 8,
        type_,
        present: 1,
        dpl: 0,
        db: u8::from(!long),
        s: 1,
        l: u8::from(long),
        g: 1,
        avl: 0,
        unusable: 0,
        padding: 0,
    }
}

/// A busy 32/64-bit task state segment: VT-x refuses to enter without one.
fn task_segment(index: u16) -> kvm_segment {
    kvm_segment { limit: 0x67, type_: 0xb, s: 0, db: 0, g: 0, ..segment(index, 0xb, false) }
}

fn descriptor(segment: &kvm_segment) -> u64 {
    let limit = if segment.g == 1 { segment.limit >> 12 } else { segment.limit };
    let flags = u64::from(segment.type_)
        | u64::from(segment.s) << 4
        | u64::from(segment.dpl) << 5
        | u64::from(segment.present) << 7
        | u64::from(segment.l) << 13
        | u64::from(segment.db) << 14
        | u64::from(segment.g) << 15;
    u64::from(limit & 0xffff) | u64::from(limit >> 16 & 0xf) << 48 | flags << 40
}

fn write_gdt(memory: &Memory, segments: &[kvm_segment]) -> Result<()> {
    for (index, segment) in segments.iter().enumerate() {
        let address = GuestAddress(layout::GDT + (index as u64 + 1) * 8);
        memory.write_obj(descriptor(segment), address)?;
    }
    Ok(())
}

/// Maps the first 4 GiB one to one with pages of 2 MiB.
fn write_page_tables(memory: &Memory) -> Result<()> {
    const PAGE: u64 = 0x1000;
    const PRESENT_WRITABLE: u64 = 3;
    const LARGE: u64 = 1 << 7;
    let directory = |n: u64| layout::PAGE_TABLES + (2 + n) * PAGE;
    let mut table = vec![0_u64; 512];
    table[0] = (layout::PAGE_TABLES + PAGE) | PRESENT_WRITABLE;
    write_table(memory, layout::PAGE_TABLES, &table)?;
    table[0] = 0;
    for (entry, n) in table.iter_mut().zip(0..4) {
        *entry = directory(n) | PRESENT_WRITABLE;
    }
    write_table(memory, layout::PAGE_TABLES + PAGE, &table)?;
    for n in 0..4 {
        for (entry, m) in table.iter_mut().zip(0..512) {
            *entry = ((n * 512 + m) << 21) | PRESENT_WRITABLE | LARGE;
        }
        write_table(memory, directory(n), &table)?;
    }
    Ok(())
}

fn write_table(memory: &Memory, address: u64, entries: &[u64]) -> Result<()> {
    let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
    memory.write_slice(&bytes, GuestAddress(address))
}

/// Model-specific registers at boot, for every processor: what a firmware would leave behind.
pub fn msrs() -> Vec<kvm_msr_entry> {
    const MISC_ENABLE: u32 = 0x1a0;
    const FAST_STRING: u64 = 1;
    const MTRR_DEF_TYPE: u32 = 0x2ff;
    const MTRR_ENABLE: u64 = 1 << 11;
    const WRITE_BACK: u64 = 6;
    let entry = |index, data| kvm_msr_entry { index, data, ..Default::default() };
    vec![entry(MISC_ENABLE, FAST_STRING), entry(MTRR_DEF_TYPE, MTRR_ENABLE | WRITE_BACK)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> Memory {
        crate::memory::fresh(32 << 20).unwrap()
    }

    #[test]
    fn descriptors_are_those_of_the_manual() {
        assert_eq!(descriptor(&segment(1, 0xb, true)), 0x00af_9b00_0000_ffff);
        assert_eq!(descriptor(&segment(1, 0xb, false)), 0x00cf_9b00_0000_ffff);
        assert_eq!(descriptor(&segment(2, 0x3, false)), 0x00cf_9300_0000_ffff);
    }

    #[test]
    fn page_tables_map_four_gigabytes() {
        let memory = memory();
        let mut sregs = kvm_sregs::default();
        Entry::Linux64(0x100_0000).system_registers(&memory, &mut sregs).unwrap();
        let last: u64 =
            memory.read_obj(GuestAddress(layout::PAGE_TABLES + 6 * 0x1000 - 8)).unwrap();
        assert_eq!(last, 0xffe0_0083);
        assert_eq!(sregs.efer, 0x500);
    }

    #[test]
    fn the_stamp_jumps_to_the_entry() {
        let memory = memory();
        let stamped = Entry::Pvh(0x12_3456).stamped(&memory).unwrap();
        assert_eq!(stamped, Entry::Pvh(layout::STAMP_CODE as u32));
        let mut code = [0; 11];
        memory.read_slice(&mut code, GuestAddress(layout::STAMP_CODE)).unwrap();
        let port = guest_protocol::DEBUG_PORT as u8;
        assert_eq!(code, [0xb0, 0x50, 0xe6, port, 0xb8, 0x56, 0x34, 0x12, 0, 0xff, 0xe0]);
    }
}
