//! Parser for the functions that a vDSO image exports. The image comes from another node, so every field is
//! validated.

use crate::error::{Error, Result};

/// Most functions that an image may export. Kernels export about 14, aliases included.
const FUNCTIONS_MAX: usize = 256;
/// Most bytes of a function name.
const NAME_MAX: usize = 64;
/// First bytes of an ELF image for this architecture: 64 bits, little-endian.
const ELF_MAGIC: &[u8] = b"\x7fELF\x02\x01";
const EM_X86_64: u16 = 62;
const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
/// Tags of the dynamic section.
const DT_HASH: u64 = 4;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_STRSZ: u64 = 10;
const DT_GNU_HASH: u64 = 0x6fff_fef5;
/// Sizes in bytes of a program header, an entry of the dynamic section, and a symbol.
const PROGRAM_HEADER_BYTES: u64 = 56;
const DYNAMIC_ENTRY_BYTES: u64 = 16;
const SYMBOL_BYTES: u64 = 24;
/// `STT_FUNC`.
const STT_FUNC: u8 = 2;

/// A function exported by an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VdsoFunction {
    /// Name by which programs find the function.
    pub name: Vec<u8>,
    /// Offset in the image, bytes.
    pub offset: u64,
    /// Size in bytes.
    pub size: u64,
}

/// Returns the functions that an image exports, all within the image. A function with several names appears once for
/// each name.
///
/// # Errors
/// [`Error::Image`] if the bytes are not a vDSO image for x86_64.
pub fn functions(image: &[u8]) -> Result<Vec<VdsoFunction>> {
    let image = ElfImage::read(image).ok_or(Error::Image("the vDSO is no ELF image for x86_64"))?;
    image
        .functions()
        .ok_or(Error::Image("invalid symbol table of the vDSO"))
}

/// An image and its symbol tables.
struct ElfImage<'a> {
    bytes: &'a [u8],
    symbols: u64,
    strings: &'a [u8],
    symbol_count: u64,
    /// Address for which the image was linked.
    link_address: u64,
}

impl<'a> ElfImage<'a> {
    fn read(bytes: &'a [u8]) -> Option<Self> {
        if !bytes.starts_with(ELF_MAGIC) || u16_at(bytes, 18)? != EM_X86_64 {
            return None;
        }
        if u16_at(bytes, 54)? != PROGRAM_HEADER_BYTES as u16 {
            return None;
        }
        let (headers, count) = (u64_at(bytes, 32)?, u64::from(u16_at(bytes, 56)?));
        let (mut linked, mut dynamic) = (None, None);
        for number in 0..count {
            let at = headers.checked_add(number * PROGRAM_HEADER_BYTES)?;
            let word = |more: u64| u64_at(bytes, at.checked_add(more)?);
            match u32_at(bytes, at)? {
                PT_LOAD if linked.is_none() => linked = Some(word(16)?.wrapping_sub(word(8)?)),
                PT_DYNAMIC => dynamic = Some(slice(bytes, word(8)?, word(32)?)?),
                _ => {}
            }
        }
        Self::with_tables(bytes, linked?, dynamic?)
    }

    fn with_tables(bytes: &'a [u8], linked: u64, dynamic: &[u8]) -> Option<Self> {
        let entries = dynamic.chunks_exact(DYNAMIC_ENTRY_BYTES as usize);
        let found = |wanted: u64| {
            let mut entries = entries.clone();
            let has_tag = |entry: &&[u8]| u64_at(entry, 0) == Some(wanted);
            u64_at(entries.find(has_tag)?, 8)
        };
        let image_offset = |tag: u64| Some(found(tag)?.wrapping_sub(linked));
        let count = match image_offset(DT_HASH) {
            // The table's second word is its number of chains: one for each symbol.
            Some(at) => u64::from(u32_at(bytes, at.checked_add(4)?)?),
            None => gnu_hash_symbol_count(bytes, image_offset(DT_GNU_HASH)?)?,
        };
        Some(Self {
            bytes,
            symbols: image_offset(DT_SYMTAB)?,
            strings: slice(bytes, image_offset(DT_STRTAB)?, found(DT_STRSZ)?)?,
            symbol_count: count,
            link_address: linked,
        })
    }

    fn functions(&self) -> Option<Vec<VdsoFunction>> {
        let mut functions = Vec::new();
        for number in 1..self.symbol_count.max(1) {
            let at = self
                .symbols
                .checked_add(number.checked_mul(SYMBOL_BYTES)?)?;
            let symbol = slice(self.bytes, at, SYMBOL_BYTES)?;
            let is_defined = u16_at(symbol, 6)? != 0;
            if symbol[4] & 0xf != STT_FUNC || !is_defined {
                continue;
            }
            let offset = u64_at(symbol, 8)?.wrapping_sub(self.link_address);
            let size = u64_at(symbol, 16)?;
            slice(self.bytes, offset, size)?;
            let name = self.strings.get(u32_at(symbol, 0)? as usize..)?;
            let end = name.iter().take(NAME_MAX).position(|byte| *byte == 0)?;
            if functions.len() == FUNCTIONS_MAX {
                return None;
            }
            functions.push(VdsoFunction {
                name: name[..end].to_vec(),
                offset,
                size,
            });
        }
        Some(functions)
    }
}

/// Returns the number of symbols according to a `DT_GNU_HASH` table, whose last chain ends with the last symbol.
fn gnu_hash_symbol_count(bytes: &[u8], at: u64) -> Option<u64> {
    let word = |index: u64| u32_at(bytes, at.checked_add(index.checked_mul(4)?)?);
    let (buckets, first, bloom) = (word(0)?, word(1)?, word(2)?);
    let (buckets, first) = (u64::from(buckets), u64::from(first));
    let start = 4 + 2 * u64::from(bloom);
    let mut last = 0;
    for bucket in 0..buckets {
        last = last.max(u64::from(word(start + bucket)?));
    }
    let chain = |symbol: u64| word(start + buckets + symbol.checked_sub(first)?);
    while last != 0 && chain(last)? & 1 == 0 {
        last += 1;
    }
    Some(last + 1)
}

fn slice(bytes: &[u8], at: u64, length: u64) -> Option<&[u8]> {
    let end = at.checked_add(length)?;
    bytes.get(usize::try_from(at).ok()?..usize::try_from(end).ok()?)
}

fn array<const N: usize>(bytes: &[u8], at: u64) -> Option<[u8; N]> {
    slice(bytes, at, N as u64)?.try_into().ok()
}

fn u16_at(bytes: &[u8], at: u64) -> Option<u16> {
    array(bytes, at).map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: u64) -> Option<u32> {
    array(bytes, at).map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: u64) -> Option<u64> {
    array(bytes, at).map(u64::from_le_bytes)
}
