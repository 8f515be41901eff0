"""Text models of a question-and-answer service: a TextCNN, an LSTM and a DSSM, at Tetris's sizes."""

import torch
from torch import Tensor, nn
from torch.nn import functional as f


class TextCNN(nn.Module):
    """(batch, sequence) token ids to (batch, classes) logits: filters over 3, 4 and 5 words (Kim, 2014; Chen, 2015)."""

    def __init__(self, vocabulary: int = 8000, width: int = 300, filters: int = 100, classes: int = 69) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        # Pad by a whole filter, so that a single word is a valid input.
        self.convolutions = nn.ModuleList(nn.Conv1d(width, filters, size, padding=size - 1) for size in (3, 4, 5))
        self.dropout = nn.Dropout()
        self.classifier = nn.Linear(3 * filters, classes)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Classify by the strongest response of each filter at any position."""
        words = self.embedding(input_ids).transpose(1, 2)
        found = [f.relu(convolution(words)).amax(dim=2) for convolution in self.convolutions]
        return self.classifier(self.dropout(torch.cat(found, dim=1)))


class TextLSTM(nn.Module):
    """(batch, sequence) token ids to (batch, classes) logits: two bidirectional layers, averaged over the words."""

    def __init__(self, vocabulary: int = 10000, width: int = 200, hidden: int = 320, classes: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, num_layers=2, batch_first=True, bidirectional=True)
        self.classifier = nn.Linear(2 * hidden, classes)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Classify by the mean of the states in both directions."""
        states, _ = self.lstm(self.embedding(input_ids))
        return self.classifier(states.mean(dim=1))


class DSSM(nn.Module):
    """(batch, sequence) letter trigrams of a query and of a document to their (batch) similarity (Huang et al., 2013).

    The first layer sums the rows of the trigrams that occur, which is the product with their counts. Id 0 pads.
    """

    def __init__(self, vocabulary: int = 20000, hidden: int = 300, embedding: int = 128) -> None:
        super().__init__()
        self.trigrams = nn.Embedding(vocabulary, hidden, padding_idx=0)
        self.hidden = nn.Linear(hidden, hidden)
        self.embedding = nn.Linear(hidden, embedding)

    def forward(self, query: Tensor, document: Tensor) -> Tensor:
        """Return the cosine of the angle between the two embeddings."""
        return f.cosine_similarity(self.embed(query), self.embed(document), dim=1)

    def embed(self, ids: Tensor) -> Tensor:
        """Embed one text as (batch, embedding)."""
        words = torch.tanh(self.trigrams(ids).sum(dim=1))
        return torch.tanh(self.embedding(torch.tanh(self.hidden(words))))
