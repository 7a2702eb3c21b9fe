//! Routes and rules (`ip-rule(8)`) that deliver packets for another host's address to this host: for connections that
//! migrated here with their process.

use crate::netlink::{Netlink, NetlinkRequest};
use std::io;

/// Attributes of `linux/fib_rules.h`.
const FRA_IIFNAME: u16 = 3;
const FRA_PRIORITY: u16 = 6;
const FRA_FWMARK: u16 = 10;
const FRA_TABLE: u16 = 15;
/// `FR_ACT_TO_TBL`.
const ACTION_TO_TABLE: u8 = 1;
/// Attributes of `linux/rtnetlink.h`.
const RTA_OIF: u16 = 4;
const RTA_TABLE: u16 = 15;

/// Makes routing deliver to this host all packets with the mark `mark` and all packets from the interface `from_interface`.
/// `table` is both the number of a routing table that nothing else uses and the priority of the rules that lead to it.
/// Existing routes and rules stay.
///
/// # Errors
/// Errors of the netlink request.
pub fn deliver_locally(mark: u32, from_interface: &str, table: u32) -> io::Result<()> {
    for family in [libc::AF_INET, libc::AF_INET6] {
        match install_rules(family as u8, mark, from_interface, table) {
            // A host without IPv6 has no such packets to deliver.
            Err(error)
                if family == libc::AF_INET6
                    && matches!(
                        error.raw_os_error(),
                        Some(libc::EAFNOSUPPORT | libc::EOPNOTSUPP | libc::EACCES)
                    ) => {}
            other => other?,
        }
    }
    Ok(())
}

fn install_rules(family: u8, mark: u32, from_interface: &str, table: u32) -> io::Result<()> {
    let mut netlink = Netlink::new(libc::NETLINK_ROUTE)?;
    let loopback = crate::net::interface_index("lo")?;
    let flags = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
    let route = NetlinkRequest::new(libc::RTM_NEWROUTE, flags, &route_message(family))
        .attribute(RTA_OIF, &loopback.to_ne_bytes())
        .attribute(RTA_TABLE, &table.to_ne_bytes());
    netlink.change(route)?;
    let mut name = from_interface.as_bytes().to_vec();
    name.push(0);
    let conditions = [(FRA_FWMARK, &mark.to_ne_bytes()[..]), (FRA_IIFNAME, &name)];
    for (kind, value) in conditions {
        let flags = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
        let rule = NetlinkRequest::new(libc::RTM_NEWRULE, flags, &rule_message(family))
            .attribute(FRA_PRIORITY, &table.to_ne_bytes())
            .attribute(FRA_TABLE, &table.to_ne_bytes())
            .attribute(kind, value);
        match netlink.change(rule) {
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {}
            other => other?,
        }
    }
    Ok(())
}

/// Builds the `struct rtmsg` of a default route to this host itself.
fn route_message(family: u8) -> [u8; 12] {
    let mut head = [0; 12];
    head[0] = family;
    head[5] = libc::RTPROT_STATIC;
    head[6] = libc::RT_SCOPE_HOST;
    head[7] = libc::RTN_LOCAL;
    head
}

/// Builds a `struct fib_rule_hdr`.
fn rule_message(family: u8) -> [u8; 12] {
    let mut head = [0; 12];
    head[0] = family;
    head[7] = ACTION_TO_TABLE;
    head
}
