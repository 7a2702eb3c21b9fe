//! Compression by a Huffman tree that adapts to the compressed bytes: for the text of `connect`.
//!
//! A new byte is sent as the code of *new* and eight bits. All nodes are in a list by weight, lightest first; a node
//! first changes places with the last one of its weight before its weight grows.

/// Number of a node.
type HuffmanNodeIndex = usize;

/// Node for every byte that has not occurred yet.
const NEW_BYTE: HuffmanNodeIndex = 0;

#[derive(Debug)]
struct HuffmanTree {
    /// All nodes, by weight.
    list: Vec<HuffmanNodeIndex>,
    /// Index of each node in `list`.
    index_in_list: Vec<usize>,
    weight: Vec<u32>,
    parent: Vec<Option<HuffmanNodeIndex>>,
    children: Vec<Option<[HuffmanNodeIndex; 2]>>,
    leaf: [Option<HuffmanNodeIndex>; 256],
}

/// Compresses bytes; the result begins with their number, in two bytes.
///
/// # Panics
/// There are 64 KiB or more.
#[must_use]
pub fn compress(bytes: &[u8]) -> Vec<u8> {
    let count = u16::try_from(bytes.len()).expect("a text shorter than 64 KiB");
    let mut tree = HuffmanTree::new();
    let mut bits = Vec::new();
    for &byte in bytes {
        if let Some(leaf) = tree.leaf[usize::from(byte)] {
            bits.extend(tree.code_bits(leaf));
        } else {
            bits.extend(tree.code_bits(NEW_BYTE));
            bits.extend((0..8).rev().map(|place| byte >> place & 1 == 1));
        }
        tree.count_byte(byte);
    }
    let mut out = count.to_be_bytes().to_vec();
    for eight in bits.chunks(8) {
        let places = eight.iter().enumerate();
        out.push(places.fold(0, |byte, (place, bit)| byte | u8::from(*bit) << place));
    }
    // The protocol adds a zero byte after a full last byte: its length is `bits / 8 + 1`.
    out.resize(2 + bits.len() / 8 + 1, 0);
    out
}

impl HuffmanTree {
    fn new() -> Self {
        Self {
            list: vec![NEW_BYTE],
            index_in_list: vec![0],
            weight: vec![0],
            parent: vec![None],
            children: vec![None],
            leaf: [None; 256],
        }
    }

    /// Returns the bits that lead from the root to a node.
    fn code_bits(&self, node: HuffmanNodeIndex) -> Vec<bool> {
        let ancestors = std::iter::successors(Some(node), |node| self.parent[*node]);
        let mut path: Vec<bool> = ancestors
            .filter_map(|node| Some(self.child_index(self.parent[node]?, node) == 1))
            .collect();
        path.reverse();
        path
    }

    fn count_byte(&mut self, byte: u8) {
        match self.leaf[usize::from(byte)] {
            Some(leaf) => self.increment_weight(leaf),
            None => self.add_leaf(byte),
        }
    }

    /// Replaces [`NEW_BYTE`] by a node with two children: the byte's leaf and [`NEW_BYTE`].
    fn add_leaf(&mut self, byte: u8) {
        let (leaf, inner) = (self.list.len(), self.list.len() + 1);
        let above = self.parent[NEW_BYTE];
        self.weight.extend([1, 1]);
        self.children.extend([None, Some([NEW_BYTE, leaf])]);
        self.parent.extend([Some(inner), above]);
        if let Some(above) = above {
            self.replace_child(above, NEW_BYTE, inner);
        }
        self.parent[NEW_BYTE] = Some(inner);
        self.leaf[usize::from(byte)] = Some(leaf);
        self.list.splice(1..1, [leaf, inner]);
        self.index_in_list.extend([0, 0]);
        for (place, node) in self.list.iter().enumerate() {
            self.index_in_list[*node] = place;
        }
        if let Some(above) = above {
            self.increment_weight(above);
        }
    }

    /// Adds one to the weight of a node and of all its ancestors.
    fn increment_weight(&mut self, node: HuffmanNodeIndex) {
        let last = self.last_of_weight(node);
        if last != node {
            if Some(last) != self.parent[node] {
                self.swap_in_tree(last, node);
            }
            self.swap_in_list(last, node);
        }
        self.weight[node] += 1;
        let Some(parent) = self.parent[node] else {
            return;
        };
        self.increment_weight(parent);
        // A parent stays behind its children in the list; the swap may have put the parent just before the node.
        if self.index_in_list[parent] + 1 == self.index_in_list[node] {
            self.swap_in_list(parent, node);
        }
    }

    fn last_of_weight(&self, node: HuffmanNodeIndex) -> HuffmanNodeIndex {
        let behind = self.list[self.index_in_list[node]..].iter();
        let same = behind.take_while(|other| self.weight[**other] == self.weight[node]);
        same.last().copied().unwrap_or(node)
    }

    fn swap_in_list(&mut self, a: HuffmanNodeIndex, b: HuffmanNodeIndex) {
        let (at_a, at_b) = (self.index_in_list[a], self.index_in_list[b]);
        self.list.swap(at_a, at_b);
        self.index_in_list.swap(a, b);
    }

    fn swap_in_tree(&mut self, a: HuffmanNodeIndex, b: HuffmanNodeIndex) {
        let (Some(above_a), Some(above_b)) = (self.parent[a], self.parent[b]) else {
            return;
        };
        let (side_a, side_b) = (self.child_index(above_a, a), self.child_index(above_b, b));
        self.set_child(above_a, side_a, b);
        self.set_child(above_b, side_b, a);
        self.parent.swap(a, b);
    }

    /// Returns the index of `child` among the children of `parent`.
    fn child_index(&self, parent: HuffmanNodeIndex, child: HuffmanNodeIndex) -> usize {
        self.children[parent].map_or(0, |both| usize::from(both[1] == child))
    }

    fn replace_child(
        &mut self,
        parent: HuffmanNodeIndex,
        child: HuffmanNodeIndex,
        by: HuffmanNodeIndex,
    ) {
        let side = self.child_index(parent, child);
        self.set_child(parent, side, by);
    }

    fn set_child(&mut self, parent: HuffmanNodeIndex, side: usize, child: HuffmanNodeIndex) {
        if let Some(both) = &mut self.children[parent] {
            both[side] = child;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Decompresses; no client needs this direction.
    fn expand(packed: &[u8]) -> Vec<u8> {
        let (count, rest) = packed.split_first_chunk().unwrap();
        let mut bits = rest
            .iter()
            .flat_map(|byte| (0..8).map(move |place| byte >> place & 1));
        let mut tree = HuffmanTree::new();
        let mut out = Vec::new();
        for _ in 0..u16::from_be_bytes(*count) {
            let mut node = *tree.list.last().unwrap();
            while let Some(both) = tree.children[node] {
                node = both[usize::from(bits.next().unwrap())];
            }
            let byte = if node == NEW_BYTE {
                (0..8).fold(0, |byte, _| byte << 1 | bits.next().unwrap())
            } else {
                let found = tree.leaf.iter().position(|leaf| *leaf == Some(node));
                found.unwrap() as u8
            };
            out.push(byte);
            tree.count_byte(byte);
        }
        out
    }

    /// Returns true if the tree is valid: weights in order, and each parent as heavy as its children together.
    fn is_valid(tree: &HuffmanTree) -> bool {
        let ordered = tree
            .list
            .windows(2)
            .all(|pair| tree.weight[pair[0]] <= tree.weight[pair[1]]);
        let heavy = |node: usize| match tree.children[node] {
            Some([left, right]) => tree.weight[node] == tree.weight[left] + tree.weight[right],
            None => true,
        };
        ordered && (0..tree.list.len()).all(heavy)
    }

    proptest! {
        #[test]
        fn decompression_restores_the_input(bytes in prop::collection::vec(prop_oneof![97u8..105, any::<u8>()], 0..600)) {
            prop_assert_eq!(expand(&compress(&bytes)), bytes);
        }

        #[test]
        fn tree_stays_valid(bytes in prop::collection::vec(97u8..110, 0..300)) {
            let mut tree = HuffmanTree::new();
            for byte in bytes {
                tree.count_byte(byte);
                prop_assert!(is_valid(&tree));
            }
        }
    }

    #[test]
    fn frequent_byte_has_short_code() {
        assert!(compress(&[b'a'; 800]).len() < 800 / 8 + 5);
    }
}
