//! Delivery of packets to this host although their address is another's (`ip-rule(8)`): for connections that came with their
//! process.

use crate::netlink::{Message, Netlink};
use std::io;

/// Attributes of `linux/fib_rules.h`.
const FRA_IIFNAME: u16 = 3;
const FRA_PRIORITY: u16 = 6;
const FRA_FWMARK: u16 = 10;
const FRA_TABLE: u16 = 15;
/// `FR_ACT_TO_TBL`.
const TO_TABLE: u8 = 1;
/// Attributes of `linux/rtnetlink.h`.
const RTA_OIF: u16 = 4;
const RTA_TABLE: u16 = 15;

/// Has routing deliver to this host all packets that bear `mark`, and all that come from the interface called `from`. `table` is
/// the number of a routing table that nobody else uses, and the priority of the rules that lead there. What is there
/// already stays.
///
/// # Errors
/// What netlink gives.
pub fn deliver_here(mark: u32, from: &str, table: u32) -> io::Result<()> {
    for family in [libc::AF_INET, libc::AF_INET6] {
        match deliver(family as u8, mark, from, table) {
            // A host without IPv6 has none to deliver.
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

fn deliver(family: u8, mark: u32, from: &str, table: u32) -> io::Result<()> {
    let mut netlink = Netlink::new(libc::NETLINK_ROUTE)?;
    let loopback = crate::net::interface_index("lo")?;
    let flags = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
    let route = Message::new(libc::RTM_NEWROUTE, flags, &route_head(family))
        .attribute(RTA_OIF, &loopback.to_ne_bytes())
        .attribute(RTA_TABLE, &table.to_ne_bytes());
    netlink.change(route)?;
    let mut name = from.as_bytes().to_vec();
    name.push(0);
    let condition = [(FRA_FWMARK, &mark.to_ne_bytes()[..]), (FRA_IIFNAME, &name)];
    for (kind, value) in condition {
        let flags = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
        let rule = Message::new(libc::RTM_NEWRULE, flags, &rule_head(family))
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

/// `struct rtmsg` of a default route to this very host.
fn route_head(family: u8) -> [u8; 12] {
    let mut head = [0; 12];
    head[0] = family;
    head[5] = libc::RTPROT_STATIC;
    head[6] = libc::RT_SCOPE_HOST;
    head[7] = libc::RTN_LOCAL;
    head
}

/// `struct fib_rule_hdr`.
fn rule_head(family: u8) -> [u8; 12] {
    let mut head = [0; 12];
    head[0] = family;
    head[7] = TO_TABLE;
    head
}
