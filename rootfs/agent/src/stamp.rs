//! Boot stamps: a byte written to an I/O port tells the VMM how far the guest is, at the cost of
//! one exit. Outside a CubeVMM, or without the right, nothing happens.

/// Writes `code` to the debug port.
#[cfg(target_arch = "x86_64")]
pub fn stamp(code: u8) {
    use guest_protocol::DEBUG_PORT;

    // SAFETY: takes no pointers; the permission is for one port, and for this thread.
    if unsafe { libc::ioperm(DEBUG_PORT.into(), 1, 1) } != 0 {
        return;
    }
    // SAFETY: writing to this port touches no memory. On a PC it is the mask register of the
    // second DMA controller, and every stamp's low bits say what it has since power-on: the
    // channel that the first controller hangs on is enabled.
    unsafe {
        std::arch::asm!("out dx, al", in("dx") DEBUG_PORT, in("al") code,
            options(nomem, nostack, preserves_flags));
    }
    // Given back, or every command would inherit it.
    // SAFETY: as above.
    unsafe { libc::ioperm(DEBUG_PORT.into(), 1, 0) };
}

/// Other architectures have no I/O ports.
#[cfg(not(target_arch = "x86_64"))]
pub fn stamp(_code: u8) {}
