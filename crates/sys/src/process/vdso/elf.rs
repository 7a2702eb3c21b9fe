//! Parser for the functions that a vDSO image exports. The image comes from another node, so every field is
//! validated.

use crate::process::error::{Error, Result};

/// Most functions that an image may export. Kernels export about 14, aliases included.
const FUNCTIONS_MAX: usize = 256;
/// Most bytes of a function name.
const NAME_MAX: usize = 64;
/// First bytes of an ELF image for this architecture: 64 bits, little-endian.
const BEGIN: &[u8] = b"\x7fELF\x02\x01";
const MACHINE: u16 = 62;
const LOAD: u32 = 1;
const DYNAMIC: u32 = 2;
/// Tags of the dynamic section.
const HASH: u64 = 4;
const STRINGS: u64 = 5;
const SYMBOLS: u64 = 6;
const STRINGS_SIZE: u64 = 10;
const GNU_HASH: u64 = 0x6fff_fef5;
/// Sizes in bytes of a program header, an entry of the dynamic section, and a symbol.
const HEADER: u64 = 56;
const ENTRY: u64 = 16;
const SYMBOL: u64 = 24;
/// `STT_FUNC`.
const FUNCTION: u8 = 2;

/// A function exported by an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
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
pub fn functions(image: &[u8]) -> Result<Vec<Function>> {
    let image = Image::read(image).ok_or(Error::Image("a vDSO that is no ELF image for x86_64"))?;
    image.functions().ok_or(Error::Image("symbols of a vDSO"))
}

/// An image and its symbol tables.
struct Image<'a> {
    bytes: &'a [u8],
    symbols: u64,
    strings: &'a [u8],
    count: u64,
    /// Address for which the image was linked.
    linked: u64,
}

impl<'a> Image<'a> {
    fn read(bytes: &'a [u8]) -> Option<Self> {
        if !bytes.starts_with(BEGIN) || u16_at(bytes, 18)? != MACHINE {
            return None;
        }
        if u16_at(bytes, 54)? != HEADER as u16 {
            return None;
        }
        let (headers, count) = (u64_at(bytes, 32)?, u64::from(u16_at(bytes, 56)?));
        let (mut linked, mut dynamic) = (None, None);
        for number in 0..count {
            let at = headers.checked_add(number * HEADER)?;
            let word = |more: u64| u64_at(bytes, at.checked_add(more)?);
            match u32_at(bytes, at)? {
                LOAD if linked.is_none() => linked = Some(word(16)?.wrapping_sub(word(8)?)),
                DYNAMIC => dynamic = Some(part(bytes, word(8)?, word(32)?)?),
                _ => {}
            }
        }
        Self::with_tables(bytes, linked?, dynamic?)
    }

    fn with_tables(bytes: &'a [u8], linked: u64, dynamic: &[u8]) -> Option<Self> {
        let entries = dynamic.chunks_exact(ENTRY as usize);
        let found = |wanted: u64| {
            let mut entries = entries.clone();
            let is_it = |entry: &&[u8]| u64_at(entry, 0) == Some(wanted);
            u64_at(entries.find(is_it)?, 8)
        };
        let place = |tag: u64| Some(found(tag)?.wrapping_sub(linked));
        let count = match place(HASH) {
            // The table's second word is its number of chains: one for each symbol.
            Some(at) => u64::from(u32_at(bytes, at.checked_add(4)?)?),
            None => counted(bytes, place(GNU_HASH)?)?,
        };
        Some(Self {
            bytes,
            symbols: place(SYMBOLS)?,
            strings: part(bytes, place(STRINGS)?, found(STRINGS_SIZE)?)?,
            count,
            linked,
        })
    }

    fn functions(&self) -> Option<Vec<Function>> {
        let mut functions = Vec::new();
        for number in 1..self.count.max(1) {
            let at = self.symbols.checked_add(number.checked_mul(SYMBOL)?)?;
            let symbol = part(self.bytes, at, SYMBOL)?;
            let is_there = u16_at(symbol, 6)? != 0;
            if symbol[4] & 0xf != FUNCTION || !is_there {
                continue;
            }
            let offset = u64_at(symbol, 8)?.wrapping_sub(self.linked);
            let size = u64_at(symbol, 16)?;
            part(self.bytes, offset, size)?;
            let name = self.strings.get(u32_at(symbol, 0)? as usize..)?;
            let end = name.iter().take(NAME_MAX).position(|byte| *byte == 0)?;
            if functions.len() == FUNCTIONS_MAX {
                return None;
            }
            functions.push(Function {
                name: name[..end].to_vec(),
                offset,
                size,
            });
        }
        Some(functions)
    }
}

/// Returns the number of symbols according to a `DT_GNU_HASH` table, whose last chain ends with the last symbol.
fn counted(bytes: &[u8], at: u64) -> Option<u64> {
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

fn part(bytes: &[u8], at: u64, length: u64) -> Option<&[u8]> {
    let end = at.checked_add(length)?;
    bytes.get(usize::try_from(at).ok()?..usize::try_from(end).ok()?)
}

fn array<const N: usize>(bytes: &[u8], at: u64) -> Option<[u8; N]> {
    part(bytes, at, N as u64)?.try_into().ok()
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
