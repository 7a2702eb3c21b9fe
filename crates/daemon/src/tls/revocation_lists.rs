//! Revocation lists of the group's authorities, of which the newest counts.

use std::collections::BTreeMap;
use std::path::Path;

use holdfast_api::enrolment::{AuthorityId, authority_id};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use x509_parser::prelude::{CertificateRevocationList, FromDer, X509Certificate};

use super::{TlsError, read_certificates, read_revocations};
use crate::config::TlsConfig;

/// Reason why a revocation list is not put in force.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RevocationError {
    /// The bytes are not a revocation list.
    #[error("not a revocation list ({0}); make it with `holdfast ca revoke`")]
    Malformed(String),
    /// No authority of `[tls] ca` has signed the list.
    #[error(
        "no authority of [tls] ca has signed the revocation list; use the list of the group's authority"
    )]
    Signature,
    /// A list with the same or a higher number is in force.
    #[error("revocation list {offered} is not newer than {current}, which is in force")]
    NotNewer {
        /// Number of the refused revocation list.
        offered: u64,
        /// Number of the revocation list in force.
        current: u64,
    },
}

/// The authorities that a node trusts, and the newest list of each.
#[derive(Debug, Clone, Default)]
pub struct RevocationLists {
    authorities: BTreeMap<AuthorityId, CertificateDer<'static>>,
    lists: BTreeMap<AuthorityId, SignedList>,
}

/// A revocation list whose signature was verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignedList {
    /// Authority that signed the list.
    pub authority: AuthorityId,
    /// The list's number, which grows with each list of the authority (RFC 5280, section 5.2.3).
    pub number: u64,
    /// Number of revoked certificates.
    pub revoked: usize,
    /// The revocation list in DER.
    pub der: Vec<u8>,
}

impl RevocationLists {
    /// Reads the authorities of `config`, and their lists if `[tls] crl` names a file.
    ///
    /// # Errors
    /// A file is missing or damaged, or holds a list of another authority.
    pub fn from_files(config: &TlsConfig) -> Result<RevocationLists, TlsError> {
        let authorities = read_certificates(&config.ca)?.into_iter();
        let authorities = authorities
            .filter_map(|certificate| Some((authority_id(&certificate)?, certificate)))
            .collect();
        let mut lists = RevocationLists {
            authorities,
            lists: BTreeMap::new(),
        };
        if let Some(path) = &config.crl {
            for list in read_revocations(path)? {
                lists.add_if_newer(path, &list)?;
            }
        }
        Ok(lists)
    }

    /// Adds the lists in a file that [`RevocationLists::to_bytes`] made. A missing file has no lists.
    ///
    /// # Errors
    /// The file cannot be read, or holds something else.
    pub fn add_saved(&mut self, path: &Path) -> Result<(), TlsError> {
        let bytes = match std::fs::read(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            read => read.map_err(|error| TlsError::Malformed {
                path: path.to_owned(),
                problem: error.to_string(),
            })?,
        };
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let after = match CertificateRevocationList::from_der(rest) {
                Ok((after, _)) => after,
                Err(error) => {
                    return Err(TlsError::RevocationList {
                        path: path.to_owned(),
                        problem: RevocationError::Malformed(error.to_string()),
                    });
                }
            };
            let (list, after) = rest.split_at(rest.len() - after.len());
            self.add_if_newer(path, list)?;
            rest = after;
        }
        Ok(())
    }

    /// Adds a revocation list in DER. Returns the verified list.
    ///
    /// # Errors
    /// The list is not signed by an authority, or not newer than the one in force.
    pub fn add(&mut self, der: &[u8]) -> Result<SignedList, RevocationError> {
        let list = self.verify(der)?;
        if let Some(current) = self.lists.get(&list.authority)
            && current.number >= list.number
        {
            return Err(RevocationError::NotNewer {
                offered: list.number,
                current: current.number,
            });
        }
        self.lists.insert(list.authority, list.clone());
        Ok(list)
    }

    /// Returns the revocation lists in force.
    pub fn lists(&self) -> impl Iterator<Item = &SignedList> {
        self.lists.values()
    }

    /// Returns the number of the list of an authority; none if that has no list.
    pub fn number_of(&self, authority: &AuthorityId) -> Option<u64> {
        self.lists.get(authority).map(|list| list.number)
    }

    /// Returns true if a list revokes the certificate with this serial number (big endian).
    pub fn revokes(&self, serial: &[u8]) -> bool {
        self.lists().any(|list| {
            CertificateRevocationList::from_der(&list.der).is_ok_and(|(_, list)| {
                let mut revoked = list.iter_revoked_certificates();
                revoked.any(|certificate| certificate.raw_serial() == serial)
            })
        })
    }

    /// Returns the trusted authorities.
    pub fn authorities(&self) -> impl Iterator<Item = AuthorityId> {
        self.authorities.keys().copied()
    }

    /// Returns all lists as the content of a file.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.lists().flat_map(|list| list.der.clone()).collect()
    }

    /// Returns true if every authority has a list.
    pub(super) fn are_complete(&self) -> bool {
        self.lists.len() == self.authorities.len()
    }

    pub(super) fn for_verifier(&self) -> Vec<CertificateRevocationListDer<'static>> {
        self.lists().map(|list| list.der.clone().into()).collect()
    }

    fn add_if_newer(&mut self, path: &Path, der: &[u8]) -> Result<(), TlsError> {
        match self.add(der) {
            Ok(_) | Err(RevocationError::NotNewer { .. }) => Ok(()),
            Err(problem) => Err(TlsError::RevocationList {
                path: path.to_owned(),
                problem,
            }),
        }
    }

    fn verify(&self, der: &[u8]) -> Result<SignedList, RevocationError> {
        let malformed =
            |cause: &dyn std::fmt::Display| RevocationError::Malformed(cause.to_string());
        let (rest, list) =
            CertificateRevocationList::from_der(der).map_err(|error| malformed(&error))?;
        if !rest.is_empty() {
            return Err(malformed(&"bytes follow its end"));
        }
        // The verifier of connections has a parser of its own, which must be able to read the list too.
        webpki::OwnedCertRevocationList::from_der(der).map_err(|error| malformed(&error))?;
        let is_signer = |certificate: &CertificateDer<'_>| {
            X509Certificate::from_der(certificate).is_ok_and(|(_, certificate)| {
                certificate.subject().as_raw() == list.issuer().as_raw()
                    && list.verify_signature(certificate.public_key()).is_ok()
            })
        };
        let mut authorities = self.authorities.iter();
        let signer = authorities.find(|(_, certificate)| is_signer(certificate));
        let (authority, _) = signer.ok_or(RevocationError::Signature)?;
        let number = list.crl_number().map(|number| number.to_u64_digits());
        let number = match number.as_deref() {
            Some([number]) => *number,
            Some([]) => 0,
            _ => return Err(malformed(&"it has no number, or too large a one")),
        };
        Ok(SignedList {
            authority: *authority,
            number,
            revoked: list.iter_revoked_certificates().count(),
            der: der.to_vec(),
        })
    }
}

#[cfg(test)]
mod tests {
    use holdfast_api::ca::CertificateAuthority;

    use super::*;

    struct TestAuthority {
        dir: tempfile::TempDir,
        authority: CertificateAuthority,
    }

    impl TestAuthority {
        fn new() -> TestAuthority {
            let dir = tempfile::tempdir().unwrap();
            let authority = CertificateAuthority::init(dir.path(), "web").unwrap();
            TestAuthority { dir, authority }
        }

        fn revoke_another(&self, name: &str) {
            self.authority.issue(name, &[], 9).unwrap();
            self.authority.revoke(name).unwrap();
        }

        fn config(&self, has_list: bool) -> TlsConfig {
            let file = |name: &str| self.dir.path().join(name);
            TlsConfig {
                ca: file("ca.pem"),
                cert: file("n1.pem"),
                key: file("n1.key"),
                crl: has_list.then(|| file("ca.crl")),
            }
        }

        fn list(&self) -> Vec<u8> {
            read_revocations(&self.dir.path().join("ca.crl")).unwrap()[0].to_vec()
        }
    }

    #[test]
    fn newest_list_of_an_authority_counts() {
        let group = TestAuthority::new();
        let mut lists = RevocationLists::from_files(&group.config(false)).unwrap();
        assert_eq!((lists.lists().count(), lists.authorities().count()), (0, 1));
        let first = group.list();
        assert_eq!(lists.add(&first).unwrap().number, 1);
        group.revoke_another("a");
        let second = group.list();
        let added = lists.add(&second).unwrap();
        assert_eq!((added.number, added.revoked), (2, 1));
        for old in [&first, &second] {
            let refused = lists.add(old);
            assert!(
                matches!(refused, Err(RevocationError::NotNewer { current: 2, .. })),
                "{refused:?}"
            );
        }
        assert_eq!(lists.lists().next().unwrap().der, second);
    }

    #[test]
    fn list_names_the_revoked_certificates() {
        let group = TestAuthority::new();
        let serial = |name: &str| {
            let issued = group.authority.issue(name, &[], 9).unwrap();
            let certificate = &read_certificates(&issued.cert).unwrap()[0];
            let content = crate::tls::read_content(certificate).unwrap();
            content.serial
        };
        let (kept, revoked) = (serial("a"), serial("b"));
        group.authority.revoke("b").unwrap();
        let lists = RevocationLists::from_files(&group.config(true)).unwrap();
        assert!(lists.revokes(&revoked) && !lists.revokes(&kept));
        let authority = lists.authorities().next().unwrap();
        assert_eq!(lists.number_of(&authority), Some(2));
        assert_eq!(lists.number_of(&AuthorityId([0; 16])), None);
    }

    #[test]
    fn saved_and_configured_lists_are_merged() {
        let group = TestAuthority::new();
        let saved = group.dir.path().join("saved");
        let mut lists = RevocationLists::from_files(&group.config(true)).unwrap();
        lists.add_saved(&saved).unwrap();
        assert_eq!(lists.lists().next().unwrap().number, 1);
        group.revoke_another("a");
        lists.add(&group.list()).unwrap();
        std::fs::write(&saved, lists.to_bytes()).unwrap();
        let mut again = RevocationLists::from_files(&group.config(false)).unwrap();
        again.add_saved(&saved).unwrap();
        assert_eq!(again.lists().next().unwrap().number, 2);
        std::fs::write(&saved, &lists.to_bytes()[1..]).unwrap();
        assert!(again.add_saved(&saved).is_err());
    }

    #[test]
    fn list_of_another_authority_or_a_changed_one_is_refused() {
        let (group, other) = (TestAuthority::new(), TestAuthority::new());
        let mut lists = RevocationLists::from_files(&group.config(false)).unwrap();
        assert_eq!(lists.add(&other.list()), Err(RevocationError::Signature));
        let list = group.list();
        for position in 0..list.len() {
            let mut changed = list.clone();
            changed[position] ^= 1;
            assert!(lists.add(&changed).is_err(), "byte {position}");
        }
        assert!(lists.add(&[list.clone(), vec![0]].concat()).is_err());
        assert!(lists.add(&[]).is_err());
        assert!(lists.add(&list).is_ok());
        let config = TlsConfig {
            crl: Some(other.dir.path().join("ca.crl")),
            ..group.config(false)
        };
        let error = RevocationLists::from_files(&config).unwrap_err();
        assert!(error.to_string().contains("ca.crl"), "{error}");
    }
}
