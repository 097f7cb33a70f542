//! A guest of two dozen bytes in an ELF file that every VMM for Linux can load.
//!
//! It has a PVH entry (32-bit) and an ELF entry (64-bit) at the same place, and its instructions
//! mean the same in both modes. They are plain ones, which a KVM that interprets guests knows, too.

/// What the guest writes to [`DEBUG_PORT`] first.
pub const STAMP: u8 = 0xf0;
/// CubeVMM's port for guest stamps.
pub const DEBUG_PORT: u8 = 0xd4;
/// Where it is loaded and entered.
const LOAD_ADDRESS: u64 = 0x10_0000;

const ELF_HEADER_SIZE: usize = 64;
const PROGRAM_HEADER_SIZE: usize = 56;
const NOTE_OFFSET: usize = 0x200;
const CODE_OFFSET: usize = 0x1000;

/// From elf.h and xen/interface/elfnote.h.
const EM_X86_64: u16 = 62;
const ET_EXEC: u16 = 2;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
const READ_EXECUTE: u32 = 5;
const XEN_ELFNOTE_PHYS32_ENTRY: u32 = 18;

/// Says that it runs, writes one byte to the first serial port, and ends the machine in the two
/// ways there are: ACPI's sleep register where ACPI hardware-reduced VMMs have it (the only one
/// that Cloud Hypervisor takes for an end), and the keyboard controller (the only one that
/// Firecracker has). A VMM without the first ignores it.
#[rustfmt::skip]
pub const CODE: &[u8] = &[
    0xb0, STAMP, 0xe6, DEBUG_PORT,              // mov al, STAMP; out DEBUG_PORT, al
    0x66, 0xba, 0xf8, 0x03, 0xb0, b'x', 0xee,   // mov dx, 0x3f8; mov al, 'x'; out dx, al
    0x66, 0xba, 0x00, 0x06, 0xb0, 0x34, 0xee,   // mov dx, 0x600; mov al, S5 | enable; out dx, al
    0xb0, 0xfe, 0xe6, 0x64,                     // mov al, 0xfe; out 0x64, al
    0xf4, 0xeb, 0xfd,                           // hlt; jmp hlt
];

/// Where `cube-vmm` has the generation id: in a page of its own at the end of the ACPI area.
pub const GENERATION: u32 = 0xf_f000;

/// Prints one byte, then says that it runs, again and again, until the generation id is another: then
/// it has been restored, and ends. 32-bit, so for the PVH entry only.
#[rustfmt::skip]
pub const UNTIL_RESTORED: &[u8] = &[
    0x66, 0xba, 0xf8, 0x03, 0xb0, b'x', 0xee,   // mov dx, 0x3f8; mov al, 'x'; out dx, al
    0x8b, 0x1d, 0x00, 0xf0, 0x0f, 0x00,         // mov ebx, [GENERATION]
    // again:
    0xb0, STAMP, 0xe6, DEBUG_PORT,              // mov al, STAMP; out DEBUG_PORT, al
    0x3b, 0x1d, 0x00, 0xf0, 0x0f, 0x00,         // cmp ebx, [GENERATION]
    0x74, 0xf4,                                 // je again
    0xb0, STAMP, 0xe6, DEBUG_PORT,              // mov al, STAMP; out DEBUG_PORT, al
    0x66, 0xba, 0x00, 0x06, 0xb0, 0x34, 0xee,   // mov dx, 0x600; mov al, S5 | enable; out dx, al
    0xb0, 0xfe, 0xe6, 0x64,                     // mov al, 0xfe; out 0x64, al
    0xf4, 0xeb, 0xfd,                           // hlt; jmp hlt
];

/// Prints one byte and sleeps for ever.
#[rustfmt::skip]
pub const IDLE: &[u8] = &[
    0x66, 0xba, 0xf8, 0x03, 0xb0, b'x', 0xee,   // mov dx, 0x3f8; mov al, 'x'; out dx, al
    0xf4, 0xeb, 0xfd,                           // hlt; jmp hlt
];

/// Where [`dirtying`] guests write: from 16 MiB on.
const DIRTIED: u32 = 16 << 20;

/// Writes to each page of `bytes` of memory and prints one byte, again whenever the generation id is
/// another; meanwhile it writes to the pages of the first `steadily` bytes of them, over and over.
/// 32-bit, so for the PVH entry only.
pub fn dirtying(bytes: u32, steadily: u32) -> Vec<u8> {
    let generation = GENERATION.to_le_bytes();
    let mut code = vec![0x66, 0xba, 0xf8, 0x03]; // mov dx, 0x3f8
    let again = code.len();
    code.extend(write_to_each_page_of(bytes));
    code.extend([0xb0, b'x', 0xee, 0x8b, 0x1d]); // mov al, 'x'; out dx, al; mov ebx, [GENERATION]
    code.extend(generation);
    let wait = code.len();
    if steadily > 0 {
        code.extend(write_to_each_page_of(steadily));
    }
    code.extend([0x3b, 0x1d]); // cmp ebx, [GENERATION]
    code.extend(generation);
    for (jump, to) in [(0x74, wait), (0xeb, again)] {
        // je wait; jmp again
        let from = code.len() + 2;
        code.extend([jump, (to as i64 - from as i64) as u8]);
    }
    code
}

/// Writes to each page of `bytes` of memory, a power of two, in an order that no read-ahead guesses, says
/// that it has, and prints one byte; again whenever the generation id is another. 32-bit, so for the PVH
/// entry only.
pub fn scattering(bytes: u32) -> Vec<u8> {
    // An odd number of pages, so that each has its turn.
    const STRIDE: u32 = 4096 * 6521;
    let generation = GENERATION.to_le_bytes();
    let mut code = vec![0x66, 0xba, 0xf8, 0x03]; // mov dx, 0x3f8
    let again = code.len();
    code.push(0xbe); // mov esi, pages
    code.extend((bytes / 4096).to_le_bytes());
    code.extend([0x31, 0xc9]); // xor ecx, ecx
    // next: inc dword ptr [ecx + DIRTIED]; add ecx, STRIDE; and ecx, bytes - 1
    for (instruction, number) in
        [([0xff, 0x81], DIRTIED), ([0x81, 0xc1], STRIDE), ([0x81, 0xe1], bytes - 1)]
    {
        code.extend(instruction);
        code.extend(number.to_le_bytes());
    }
    code.extend([0x4e, 0x75, 0xeb]); // dec esi; jne next
    code.extend([0xb0, STAMP, 0xe6, DEBUG_PORT]); // mov al, STAMP; out DEBUG_PORT, al
    code.extend([0xb0, b'x', 0xee, 0x8b, 0x1d]); // mov al, 'x'; out dx, al; mov ebx, [GENERATION]
    code.extend(generation);
    code.extend([0x3b, 0x1d]); // wait: cmp ebx, [GENERATION]
    code.extend(generation);
    code.extend([0x74, 0xf8, 0xeb]); // je wait; jmp again
    code.push((again as i64 - (code.len() as i64 + 1)) as u8);
    code
}

fn write_to_each_page_of(bytes: u32) -> Vec<u8> {
    let mut code = vec![0xbf]; // mov edi, DIRTIED
    code.extend(DIRTIED.to_le_bytes());
    // next: inc dword ptr [edi]; add edi, 4096; cmp edi, DIRTIED + bytes
    code.extend([0xff, 0x07, 0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, 0x81, 0xff]);
    code.extend((DIRTIED + bytes).to_le_bytes());
    code.extend([0x72, 0xf0]); // jb next
    code
}

/// The ELF file of [`CODE`].
pub fn image() -> Vec<u8> {
    image_of(CODE)
}

/// An ELF file of these instructions.
pub fn image_of(code: &[u8]) -> Vec<u8> {
    let note = note();
    let mut file = elf_header();
    file.extend(program_header(PT_LOAD, CODE_OFFSET, code.len(), 0x1000));
    file.extend(program_header(PT_NOTE, NOTE_OFFSET, note.len(), 4));
    file.resize(NOTE_OFFSET, 0);
    file.extend(note);
    file.resize(CODE_OFFSET, 0);
    file.extend(code);
    file
}

fn elf_header() -> Vec<u8> {
    // Class 64, little endian, version 1.
    let mut header = b"\x7fELF\x02\x01\x01".to_vec();
    header.resize(16, 0);
    header.extend(ET_EXEC.to_le_bytes());
    header.extend(EM_X86_64.to_le_bytes());
    header.extend(1_u32.to_le_bytes());
    header.extend(LOAD_ADDRESS.to_le_bytes());
    header.extend((ELF_HEADER_SIZE as u64).to_le_bytes());
    // No section headers, no flags.
    header.extend(0_u64.to_le_bytes());
    header.extend(0_u32.to_le_bytes());
    for size in [ELF_HEADER_SIZE as u16, PROGRAM_HEADER_SIZE as u16, 2, 0, 0, 0] {
        header.extend(size.to_le_bytes());
    }
    header
}

fn program_header(kind: u32, offset: usize, size: usize, align: u64) -> Vec<u8> {
    let address = if kind == PT_LOAD { LOAD_ADDRESS } else { 0 };
    let (offset, size) = (offset as u64, size as u64);
    let mut header = Vec::with_capacity(PROGRAM_HEADER_SIZE);
    header.extend(kind.to_le_bytes());
    header.extend(READ_EXECUTE.to_le_bytes());
    for field in [offset, address, address, size, size, align] {
        header.extend(field.to_le_bytes());
    }
    header
}

fn note() -> Vec<u8> {
    let (name, entry) = (b"Xen\0", LOAD_ADDRESS.to_le_bytes());
    let mut note = Vec::new();
    for field in [name.len() as u32, entry.len() as u32, XEN_ELFNOTE_PHYS32_ENTRY] {
        note.extend(field.to_le_bytes());
    }
    note.extend(name);
    note.extend(entry);
    note
}

#[cfg(test)]
mod tests {
    use super::*;

    fn u64_at(file: &[u8], offset: usize) -> u64 {
        u64::from_le_bytes(file[offset..offset + 8].try_into().unwrap())
    }

    #[test]
    fn the_headers_point_at_the_code_and_the_note() {
        let file = image();
        let load = ELF_HEADER_SIZE;
        let note = load + PROGRAM_HEADER_SIZE;
        assert_eq!(u64_at(&file, 24), LOAD_ADDRESS);
        assert_eq!(u64_at(&file, 32), load as u64);
        let code_offset = u64_at(&file, load + 8) as usize;
        assert_eq!(&file[code_offset..], CODE);
        assert_eq!(u64_at(&file, load + 24), LOAD_ADDRESS);
        let note_offset = u64_at(&file, note + 8) as usize;
        assert_eq!(&file[note_offset + 12..note_offset + 16], b"Xen\0");
        assert_eq!(u64_at(&file, note_offset + 16), LOAD_ADDRESS);
    }

    #[test]
    fn the_jumps_of_a_guest_that_writes_stay_in_it() {
        let (quiet, busy) = (dirtying(4096, 0), dirtying(4096, 4096));
        // je to the comparison, and jmp to behind the first instruction.
        assert_eq!(quiet[quiet.len() - 4..], [0x74, -8_i8 as u8, 0xeb, 4_u8.wrapping_sub(44)]);
        assert_eq!(busy.len() - quiet.len(), 21);
        assert_eq!(busy[busy.len() - 4..][..2], [0x74, -29_i8 as u8]);
    }

    #[test]
    fn a_guest_that_scatters_comes_to_each_page_once() {
        let code = scattering(1 << 20);
        // Stride and mask, as they stand in the code.
        let word = |at: usize| u32::from_le_bytes(code[at..at + 4].try_into().unwrap());
        let (pages, stride, mask) = (word(5), word(19), word(25));
        let mut seen: Vec<u32> = (0..pages).map(|turn| turn.wrapping_mul(stride) & mask).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..256).map(|page| page * 4096).collect::<Vec<_>>());
        // Back to the first instruction but one.
        assert_eq!(code.len() as i64 + i64::from(*code.last().unwrap() as i8), 4);
    }

    #[test]
    fn headers_have_the_sizes_that_elf_gives_them() {
        assert_eq!(elf_header().len(), ELF_HEADER_SIZE);
        assert_eq!(program_header(PT_LOAD, 0, 0, 1).len(), PROGRAM_HEADER_SIZE);
    }
}
