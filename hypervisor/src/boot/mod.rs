//! Gets a kernel into guest memory and a vCPU to its first instruction.
//!
//! [`kernel`] opens and checks the files before anything is built, [`linux`] writes what the kernel
//! reads (command line, memory map, start info or boot parameters), [`tables`] describes the
//! machine in ACPI, [`entry`] sets the registers.

pub mod entry;
pub mod kernel;
pub mod linux;
mod pci_tables;
pub mod tables;
