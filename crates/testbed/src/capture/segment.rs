//! TCP segments of a capture file.

use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result, bail};
use etherparse::{LaxNetSlice, LaxSlicedPacket, TcpOptionElement, TcpSlice, TransportSlice};
use pcap_parser::traits::PcapReaderIterator;
use pcap_parser::{LegacyPcapReader, PcapBlockOwned, PcapError};

/// One TCP segment (RFC 9293, section 3.1) without its data. With segmentation offload, a segment can be larger than a
/// packet on a wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpSegment {
    /// Capture time, nanoseconds since 1970.
    pub at_ns: u64,
    /// Source link address: the host, or the router before it.
    pub source_mac: [u8; 6],
    /// Source address and port.
    pub from: SocketAddr,
    /// Destination address and port.
    pub to: SocketAddr,
    /// The sequence number.
    pub sequence: u32,
    /// The acknowledgement number, if any.
    pub acknowledgement: Option<u32>,
    /// Bytes of data by the IP header, even if the capture kept fewer.
    pub length: u32,
    /// The unscaled window field.
    pub window: u16,
    /// The sender's clock, from the timestamps option (RFC 7323, section 3.2).
    pub timestamp: Option<u32>,
    /// SYN.
    pub syn: bool,
    /// FIN.
    pub fin: bool,
    /// RST.
    pub rst: bool,
}

/// Most bytes of a capture's record: far more than the snapshot lengths in use.
const BUFFER_BYTES: usize = 1 << 20;

/// Reads all TCP segments of a capture file in the order of the file. Other packets and later fragments are left out.
///
/// # Errors
/// The file cannot be read, is damaged, or is not a capture of Ethernet frames in the classic format.
pub fn read_capture_file(path: &Path) -> Result<Vec<TcpSegment>> {
    let file = File::open(path).with_context(|| format!("open {}", path.display()))?;
    read_segments(file).with_context(|| format!("read {}", path.display()))
}

fn read_segments(file: File) -> Result<Vec<TcpSegment>> {
    let mut reader = LegacyPcapReader::new(BUFFER_BYTES, file).map_err(damaged_error)?;
    let mut all = Vec::new();
    let mut fraction_ns = 1000;
    loop {
        let (consumed, block) = match reader.next() {
            Ok(next) => next,
            Err(PcapError::Eof) => return Ok(all),
            Err(PcapError::Incomplete(_)) => {
                reader.refill().map_err(damaged_error)?;
                continue;
            }
            Err(error) => return Err(damaged_error(error)),
        };
        match block {
            PcapBlockOwned::LegacyHeader(header) => {
                if header.network != pcap_parser::Linktype::ETHERNET {
                    bail!(
                        "the capture has link type {} instead of Ethernet",
                        header.network
                    );
                }
                fraction_ns = if header.is_nanosecond_precision() {
                    1
                } else {
                    1000
                };
            }
            PcapBlockOwned::Legacy(packet) => {
                let at_ns = u64::from(packet.ts_sec) * 1_000_000_000
                    + u64::from(packet.ts_usec) * fraction_ns;
                all.extend(parse_segment(at_ns, packet.data));
            }
            PcapBlockOwned::NG(_) => {
                bail!("the capture has the pcapng format instead of classic pcap")
            }
        }
        reader.consume(consumed);
    }
}

fn damaged_error(error: impl std::fmt::Debug) -> anyhow::Error {
    anyhow::anyhow!("the capture is damaged or truncated: {error:?}")
}

/// Returns the TCP segment in a frame, which may be truncated.
fn parse_segment(at_ns: u64, frame: &[u8]) -> Option<TcpSegment> {
    let packet = LaxSlicedPacket::from_ethernet(frame).ok()?;
    let Some(TransportSlice::Tcp(tcp)) = &packet.transport else {
        return None;
    };
    let ip_start = packet.link.as_ref().map_or(0, |_| 14) + 4 * packet.link_exts.len();
    let tcp_start = tcp.slice().as_ptr().addr() - frame.as_ptr().addr();
    let (source, destination, total) = match packet.net.as_ref()? {
        LaxNetSlice::Ipv4(ip) => {
            let header = ip.header();
            let total = usize::from(header.total_len());
            (
                header.source_addr().into(),
                header.destination_addr().into(),
                total,
            )
        }
        LaxNetSlice::Ipv6(ip) => {
            let header = ip.header();
            let total = 40 + usize::from(header.payload_length());
            (
                header.source_addr().into(),
                header.destination_addr().into(),
                total,
            )
        }
        LaxNetSlice::Arp(_) => return None,
    };
    let headers = tcp_start - ip_start + usize::from(tcp.data_offset()) * 4;
    Some(TcpSegment {
        at_ns,
        source_mac: frame.get(6..12)?.try_into().ok()?,
        from: SocketAddr::new(source, tcp.source_port()),
        to: SocketAddr::new(destination, tcp.destination_port()),
        sequence: tcp.sequence_number(),
        acknowledgement: tcp.ack().then(|| tcp.acknowledgment_number()),
        length: u32::try_from(total.checked_sub(headers)?).ok()?,
        window: tcp.window_size(),
        timestamp: timestamp(tcp),
        syn: tcp.syn(),
        fin: tcp.fin(),
        rst: tcp.rst(),
    })
}

fn timestamp(tcp: &TcpSlice<'_>) -> Option<u32> {
    tcp.options_iterator().find_map(|option| match option {
        Ok(TcpOptionElement::Timestamp(own, _)) => Some(own),
        _ => None,
    })
}
