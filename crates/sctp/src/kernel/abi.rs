//! Structures of Linux's SCTP socket API (`linux/sctp.h`), laid out by hand because several of them are packed.

use crate::TransportConfig;
use crate::event_assembler::SctpStackConstants;
use crate::socket_api_layout::{pack_addresses, u32_at};
use holdfast_sys::address::RawAddress;
use std::net::SocketAddr;
use std::time::Duration;

pub const RTOINFO: i32 = 0;
pub const ASSOCINFO: i32 = 1;
pub const INITMSG: i32 = 2;
pub const NODELAY: i32 = 3;
pub const PEER_ADDR_PARAMS: i32 = 9;
pub const STATUS: i32 = 14;
pub const GET_PEER_ADDR_INFO: i32 = 15;
pub const PARTIAL_DELIVERY_POINT: i32 = 19;
pub const RECVRCVINFO: i32 = 32;
pub const BINDX_ADD: i32 = 100;
pub const GET_PEER_ADDRS: i32 = 108;
pub const GET_LOCAL_ADDRS: i32 = 109;
pub const CONNECTX3: i32 = 111;
pub const EVENT: i32 = 127;
pub const REMOTE_UDP_ENCAPS_PORT: i32 = 132;

/// Control message types, `enum sctp_cmsg_type`.
pub const CMSG_SNDINFO: i32 = 2;
pub const CMSG_RCVINFO: i32 = 3;

/// Send flags, `enum sctp_sinfo_flags`.
pub const UNORDERED: u16 = 1;
pub const ABORT: u16 = 4;
pub const EOF: u16 = 0x200;

/// `MSG_NOTIFICATION`.
pub const MSG_NOTIFICATION: i32 = 0x8000;

/// Notification types of `enum sctp_sn_type`, and flags.
pub const STACK_CONSTANTS: SctpStackConstants = SctpStackConstants {
    assoc_change: 0x8001,
    path_change: 0x8002,
    send_failed: 0x800d,
    first_state: 0,
    unordered: UNORDERED,
    data_sent: 1,
};

/// Size of the buffer for the kernel's address lists, bytes: 64 IPv6 addresses.
pub const ADDRESS_LIST_LEN: usize = 8 + 64 * 28;

fn milliseconds(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

fn words_to_bytes<const N: usize>(words: [u32; N]) -> Vec<u8> {
    words.into_iter().flat_map(u32::to_ne_bytes).collect()
}

/// Returns the options of `config` that every socket gets, as name and value. `receive_buffer` is the socket's
/// `SO_RCVBUF`.
pub fn options(config: &TransportConfig, receive_buffer: u32) -> Vec<(i32, Vec<u8>)> {
    let failure = &config.failure;
    let rto = [
        0,
        milliseconds(failure.rto_initial),
        milliseconds(failure.rto_max),
        milliseconds(failure.rto_min),
    ];
    let init = [
        config.outbound_streams,
        config.inbound_streams_max,
        failure.init_retransmissions,
        u16::try_from(milliseconds(failure.rto_max)).unwrap_or(u16::MAX),
    ];
    // The value is a `struct sctp_assocparams`: association, retransmissions, (read only) destinations, and three words
    // in which 0 means no change.
    let mut assoc = vec![0; 20];
    assoc[4..6].copy_from_slice(&failure.association_retransmissions.to_ne_bytes());
    // The kernel refuses more than half of its buffer, which is smaller than requested if the process lacks
    // capabilities.
    let buffer = config.receive_buffer.min(receive_buffer);
    let delivery_point = config.message_len_max.min(buffer / 2);
    let mut options = vec![
        (RTOINFO, words_to_bytes(rto)),
        (
            INITMSG,
            init.into_iter().flat_map(u16::to_ne_bytes).collect(),
        ),
        (ASSOCINFO, assoc),
        (PEER_ADDR_PARAMS, path_params(config)),
        (NODELAY, words_to_bytes([u32::from(config.no_delay)])),
        (RECVRCVINFO, words_to_bytes([1])),
        (PARTIAL_DELIVERY_POINT, words_to_bytes([delivery_point])),
    ];
    for notification in [
        STACK_CONSTANTS.assoc_change,
        STACK_CONSTANTS.path_change,
        STACK_CONSTANTS.send_failed,
    ] {
        // The value is a `struct sctp_event`: association, type, on.
        let mut event = vec![0; 8];
        event[4..6].copy_from_slice(&notification.to_ne_bytes());
        event[6] = 1;
        options.push((EVENT, event));
    }
    options
}

/// Builds a packed `struct sctp_paddrparams` without an address, for all paths of future associations.
fn path_params(config: &TransportConfig) -> Vec<u8> {
    /// Flags `SPP_HB_ENABLE` and `SPP_PMTUD_DISABLE`.
    const FLAGS: u32 = 1 | 1 << 4;
    let mut bytes = vec![0; 156];
    bytes[132..136].copy_from_slice(&milliseconds(config.failure.heartbeat).to_ne_bytes());
    bytes[136..138].copy_from_slice(&config.failure.path_retransmissions.to_ne_bytes());
    bytes[138..142].copy_from_slice(&config.path_mtu.to_ne_bytes());
    bytes[146..150].copy_from_slice(&FLAGS.to_ne_bytes());
    bytes
}

/// Builds a `struct sctp_udpencaps` for future associations.
pub fn encapsulation_option(port: Option<u16>) -> Vec<u8> {
    let mut bytes = vec![0; 144];
    // The kernel requires an address field; an address without a family stands for all.
    bytes[136..138].copy_from_slice(&port.unwrap_or(0).to_be_bytes());
    bytes
}

/// Returns `spinfo_srtt` of the primary path in a `struct sctp_status`. RFC 6458, section 8.2.2, specifies
/// milliseconds; the kernel uses its own `tick`s, which are milliseconds only at 1000 ticks per second.
pub fn smoothed_round_trip(status: &[u8], tick: Duration) -> Option<Duration> {
    Some(tick * u32_at(status, 164)?)
}

/// Length of a `struct sctp_status`, bytes.
pub const STATUS_LEN: usize = 176;

/// Path state `SCTP_UNCONFIRMED` of `enum sctp_spinfo_state`.
pub const UNCONFIRMED: u32 = 3;

/// Builds a packed `struct sctp_paddrinfo`: association, address, state, four more words.
pub fn path_info(assoc: u32, address: SocketAddr) -> Vec<u8> {
    let mut bytes = vec![0; 152];
    bytes[..4].copy_from_slice(&assoc.to_ne_bytes());
    let address = pack_addresses(&[address]);
    bytes[4..][..address.len()].copy_from_slice(&address);
    bytes
}

/// Returns `spinfo_state` of a `struct sctp_paddrinfo`.
pub fn path_state(info: &[u8]) -> Option<u32> {
    u32_at(info, 132)
}

/// Builds a `struct sctp_sndinfo`.
pub fn sndinfo(assoc: u32, stream: u16, flags: u16, ppid: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..2].copy_from_slice(&stream.to_ne_bytes());
    bytes[2..4].copy_from_slice(&flags.to_ne_bytes());
    bytes[4..8].copy_from_slice(&ppid.to_be_bytes());
    bytes[12..].copy_from_slice(&assoc.to_ne_bytes());
    bytes
}

/// Returns the same addresses with another port.
pub fn with_port(addresses: &[SocketAddr], port: u16) -> Vec<SocketAddr> {
    let with_port = |address: &SocketAddr| SocketAddr::new(address.ip(), port);
    addresses.iter().map(with_port).collect()
}

/// Returns the first address of a list, for calls that take one.
pub fn first_address(addresses: &[SocketAddr]) -> Option<RawAddress> {
    addresses
        .first()
        .map(|&first| RawAddress::for_family(first, false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_is_converted_from_ticks() {
        let mut status = [0; STATUS_LEN];
        status[164..168].copy_from_slice(&15u32.to_ne_bytes());
        let ms = Duration::from_millis;
        assert_eq!(smoothed_round_trip(&status, ms(10)), Some(ms(150)));
        assert_eq!(smoothed_round_trip(&status, ms(1)), Some(ms(15)));
        assert_eq!(smoothed_round_trip(&status[..100], ms(1)), None);
    }

    #[test]
    fn delivery_point_fits_receive_buffer() {
        let config = TransportConfig::new(vec!["127.0.0.1:0".parse().unwrap()]);
        let delivery_point = |receive_buffer| {
            let options = options(&config, receive_buffer);
            let point = options
                .into_iter()
                .find(|(name, _)| *name == PARTIAL_DELIVERY_POINT);
            point.map(|(_, value)| value)
        };
        assert_eq!(delivery_point(425_984), Some(words_to_bytes([212_992])));
        assert_eq!(
            delivery_point(2 << 20),
            Some(words_to_bytes([config.receive_buffer / 2]))
        );
    }
}
